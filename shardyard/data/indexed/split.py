"""Megatron's split of one data set into training, validation and test documents."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from shardyard.config.data_rules import split_shares
from shardyard.errors import UserError


class Splits(NamedTuple):
    """The documents of each part: consecutive ranges that together cover the set."""

    train: range
    valid: range
    test: range


def split_documents(split: str, num_documents: int) -> Splits:
    """Cut ``num_documents`` by one to three shares such as ``"98,1,1"`` (``data.split``).

    Megatron's arithmetic, so that the same documents land in the same part: the shares divided by their sum
    are added up in double precision, each bound times the number of documents is rounded half to even, and a
    share of 0 is an empty part. Source: ``blended_megatron_dataset_config.py`` and
    ``BlendedMegatronDatasetBuilder._build_megatron_dataset_splits`` of megatron-core 0.16.1.

    Raises:
        UserError: the text is no such list.
    """
    try:
        shares = np.array(split_shares(split))
    except ValueError:
        raise UserError(
            f'data.split: "{split}" is no list of one to three shares of which the first is above 0, such as '
            '"98,1,1"'
        ) from None
    bounds = list(accumulate((shares / shares.sum()).tolist(), initial=0.0))
    parts = [
        range(round(low * num_documents), round(high * num_documents)) if high > low else range(0)
        for low, high in pairwise(bounds)
    ]
    return Splits(*parts)
