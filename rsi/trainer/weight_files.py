"""Weights of a Hugging Face directory by their in-memory names, any range of rows at a time.

A rank of a sharded trainer reads the rows that it keeps and nothing else. Memory and disk differ: transformers fuses
the experts of a layer into one tensor [E, ...], files may hold one tensor an expert, and files of a multimodal model
put its text under `model.language_model.`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightFiles:
    """Tensors of all safetensors files of `directory`. Raises ValueError where there are none."""

    def __init__(self, directory: Path):
        from safetensors import safe_open

        if (directory / INDEX).is_file():
            names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
        elif (directory / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise ValueError(
                f"{directory} holds neither {SINGLE} nor {INDEX}; give a directory with safetensors weights"
            )
        self.num_bytes_read = 0
        self._directory = directory
        self._files = {name: safe_open(directory / name, "pt") for name in names}
        self._where = {key: file for file in self._files.values() for key in file.keys()}

    def fill(self, name: str, rows: Tensor, start: int) -> None:
        """Write rows `start` to `start + len(rows)` of the tensor that the model calls `name` into `rows`, in its
        dtype. Raises ValueError for a tensor that the files lack or that has another shape."""
        if not len(rows):
            return
        stored = self._stored(name)
        if stored is not None:
            rows.copy_(self._rows(stored, start, start + len(rows), name, rows))
            return
        block, _, kind = name.rpartition(".experts.")
        if kind not in PARTS:
            self._lacks(name)
        for i, row in enumerate(rows):
            for part, target in zip(PARTS[kind], row.chunk(len(PARTS[kind])), strict=True):
                key = self._stored(f"{block}.experts.{start + i}.{part}.weight")
                if key is None:
                    self._lacks(f"{name}, expert {start + i}")
                target.copy_(self._rows(key, 0, len(target), name, target))

    def _stored(self, name: str) -> str | None:
        """The name that the files give it."""
        spellings = (name, name.replace("model.", "model.language_model.", 1))
        return next((key for key in spellings if key in self._where), None)

    def _rows(self, key: str, start: int, end: int, name: str, target: Tensor) -> Tensor:
        stored = self._where[key].get_slice(key)
        shape = stored.get_shape()
        if shape[1:] != list(target.shape[1:]) or shape[0] < end:
            raise ValueError(
                f"{key} in {self._directory} is {shape} and {name} wants rows {start} to {end} of "
                f"{list(target.shape[1:])}; weights and config.json do not belong together"
            )
        rows = stored[start:end]
        self.num_bytes_read += rows.numel() * rows.element_size()
        return rows

    def _lacks(self, name: str) -> NoReturn:
        raise ValueError(f"the weights in {self._directory} lack {name}; use a complete checkpoint of that class")


PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What a fused expert tensor is called where each expert has its own."""
