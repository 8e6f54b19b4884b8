"""What a checkpoint said beyond the model, kept so that saving gives the same files back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Origin:
    """Static and hashable: it travels on the model as an attribute.

    `config` is the config.json as text. `dtypes` are the file's, by tensor name. `copies` are
    tensors that repeat one of our parameters. `stripped`: names lack the base model's prefix.
    """

    config: str
    dtypes: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, str], ...] = ()
    stripped: bool = False
    file: str = ""
    quantised: bool = False
