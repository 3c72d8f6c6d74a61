"""Looking at a run's data before it trains: what became of the rows, and samples for the eye.

view_of(config, data) -> View      the samples under one numbering, and what is known of each
survey(config, view, ...) -> dict  counts, duplicates, lengths, packs, mixture, updates
select(view, ...), show(view, ...) the samples that were asked for, as text with the trained part marked
"""

from shardyard.data.inspect.select import Wanted, select
from shardyard.data.inspect.show import Style, show
from shardyard.data.inspect.survey import survey
from shardyard.data.inspect.tables import blocks_of
from shardyard.data.inspect.view import View, view_of

__all__ = ["Style", "View", "Wanted", "blocks_of", "select", "show", "survey", "view_of"]
