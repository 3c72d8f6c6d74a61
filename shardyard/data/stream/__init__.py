"""Training data that is read and tokenised while the run trains on it, window by window.

    rows of the entries, mixed (mixture) -> windows of data.buffer_size rows (reader) -> samples and units
    (tokenise) -> one file a window, made once per node (window, cache, ahead) -> batches (sampler, store)

A window is a function of (seed, epoch, window) and the data, so a position in the stream is an address, one
integer (address), and nothing else is saved.
"""

from shardyard.data.stream.build import Stream, build_stream
from shardyard.data.stream.sampler import StreamSampler
from shardyard.data.stream.store import StreamStore

__all__ = ["Stream", "StreamSampler", "StreamStore", "build_stream"]
