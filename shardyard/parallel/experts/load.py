"""Counts of which experts the tokens chose: of one forward, by document, and of a step, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class ForwardCounts:
    """One forward of this rank, by layer. A router that sees the tokens in pieces adds them in order."""

    def __init__(self, documents: torch.Tensor | None, num_documents: int, *, balanced: bool) -> None:
        """The arguments are those of `Routing.forward`; only the loss of balance needs documents apart."""
        if documents is not None and not balanced:
            documents, num_documents = (documents >= 0).long() - 1, 1
        self._documents, self._num_documents = documents, num_documents
        self._seen: dict[int, int] = {}
        self._top_k = 1
        self._sums: dict[int, torch.Tensor] = {}
        self.counts: dict[int, torch.Tensor] = {}
        """[D, E] int64 of each layer: choices of each expert by the tokens of each document."""
        self.tables: dict[int, torch.Tensor] = {}
        """[D, E] of each layer: what the loss of balance grows by with a token's probabilities."""

    def add(self, layer: int, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Count ``index`` [N, K], the next N tokens of ``layer``; their documents [N] are returned."""
        tokens, self._top_k = index.shape
        start = self._seen.get(layer, 0)
        self._seen[layer] = start + tokens
        if self._documents is None:
            documents = index.new_zeros(tokens)
        else:
            documents = self._documents[start : start + tokens]
        if len(documents) != tokens:
            raise ValueError(f"layer {layer} routes {start + tokens} tokens, more than were announced")
        # Row 0 takes the tokens of no document.
        cells = ((documents + 1)[:, None] * experts + index).reshape(-1)
        counts = index.new_zeros((self._num_documents + 1) * experts)
        counts = counts.scatter_add_(0, cells, torch.ones_like(cells)).view(-1, experts)[1:]
        self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts
        return documents

    def add_probabilities(self, layer: int, probabilities: torch.Tensor, documents: torch.Tensor) -> None:
        """Sum ``probabilities`` [N, E] over each document's tokens; from now on ``layer`` has a table."""
        sums = probabilities.new_zeros(self._num_documents + 1, probabilities.shape[1])
        sums = sums.index_add_(0, documents + 1, probabilities)[1:]
        self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums
        self.tables.setdefault(layer, torch.zeros_like(sums))

    def finish(self, share: float, coefficient: float, sharers: Iterable[dist.ProcessGroup]) -> torch.Tensor:
        """Fill the tables with ``coefficient`` x dL/dp, and return this rank's part of L, fp32 [].

        ``share`` is 1 / (tokens of the global batch x layers). The ranks of ``sharers`` have parts of the
        same documents; one small collective each.
        """
        layers = sorted(self.tables)
        if not layers:
            return torch.zeros(())
        counts = torch.stack([self.counts[layer] for layer in layers])
        for group in sharers:
            dist.all_reduce(counts, group=group)
        # Each token makes K choices, so a document's length is the sum of its row / K.
        lengths = counts.sum(-1, keepdim=True).clamp(min=1) / self._top_k
        slopes = counts.shape[-1] * share * counts / lengths
        for layer, slope in zip(layers, slopes, strict=True):
            self.tables[layer].copy_(coefficient * slope)
        return (slopes * torch.stack([self._sums[layer] for layer in layers])).sum()


class StepLoad:
    """Choices of each expert of each layer in one step, and the loss of balance."""

    def __init__(self, layers: int, experts: int) -> None:
        """The layers of the whole model and the most experts that any has."""
        self._shape = layers, experts
        self._counts: dict[int, torch.Tensor] = {}
        self._aux_losses: list[torch.Tensor] = []

    def clear(self) -> None:
        self._counts.clear()
        self._aux_losses.clear()

    def add(self, forward: ForwardCounts, aux_loss: torch.Tensor | None) -> None:
        for layer, counts in forward.counts.items():
            total = counts.sum(0)
            self._counts[layer] = self._counts[layer] + total if layer in self._counts else total
        if aux_loss is not None:
            self._aux_losses.append(aux_loss)

    def tensors(self) -> list[torch.Tensor]:
        """All that has been added up, on its device."""
        return [*self._counts.values(), *self._aux_losses]

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """The same, from elsewhere: in the order of `tensors`."""
        layers = len(self._counts)
        self._counts = dict(zip(self._counts, tensors[:layers], strict=True))
        self._aux_losses = list(tensors[layers:])

    def over_all_ranks(self) -> tuple[torch.Tensor, float]:
        """(choices fp64 [layers, experts], loss of balance), the same on every rank; one host collective.

        Counts are exact in fp64, so no order of summation changes them.
        """
        layers, experts = self._shape
        flat = torch.zeros(layers * experts + 1, dtype=torch.float64)
        load = flat[:-1].view(layers, experts)
        for layer, counts in self._counts.items():
            load[layer, : len(counts)] = counts.cpu().double()
        if self._aux_losses:
            flat[-1] = torch.stack(self._aux_losses).cpu().double().sum()
        dist.all_reduce(flat)
        return load, float(flat[-1])
