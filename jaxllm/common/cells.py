"""Cells of tables: their Python values, and the texts of these values.

Jobs, `generate_table`, training and evaluation read every cell here. The result depends on the
value of the cell and the type of its column, and never on the other cells of the column.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.common.errors import DataError, shortened


class CellError(DataError):
    """A cell of a table has no Python value."""


class Cells(Mapping[str, Any]):
    """The cells of a row by column, each of which is read when it is used.

    Args:
        raw: Python values or Arrow scalars.
        drops_nulls: as `plain_value`.

    Raises:
        CellError: raised by access to a cell that cannot be read; names the column.

    >>> Cells({"question": b"Why?", "price": float("nan")})["question"]
    'Why?'
    """

    def __init__(self, raw: Mapping[str, Any], *, drops_nulls: bool = False) -> None:
        self.raw, self._drops_nulls = raw, drops_nulls

    def __getitem__(self, name: str) -> Any:
        value = self.raw[name]
        try:
            return plain_value(value, drops_nulls=self._drops_nulls)
        except CellError as error:
            raise CellError(f"column {name!r}: {error}") from None

    def shown(self, name: str) -> Any:
        """A cell for a digest; in place of one that cannot be read, its error."""
        try:
            return self[name]
        except CellError as error:
            return str(error)

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def plain_value(value: Any, *, drops_nulls: bool = False) -> Any:
    """The Python value of a cell.

    Bytes become text. NaN becomes None, and infinity a text, since JSON has neither. Scalars and
    arrays of numpy, pandas and Arrow become values of Python. Any other object stays as it is.

    Args:
        drops_nulls: leave out null keys, as for Arrow, which gives structs all keys of a column.
            The content of a message stays, since a null has a meaning there.

    Raises:
        CellError: the bytes are not UTF-8, or Python has no such date.

    >>> plain_value([{"role": b"user", "name": None}], drops_nulls=True)
    [{'role': 'user'}]
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError as failure:
            raise CellError(
                f"holds bytes that are not UTF-8 text (byte {failure.start}); store text in it, "
                "or leave the column out"
            ) from None
    if hasattr(value, "as_py"):  # before Mapping, as which Arrow registers its structs
        return plain_value(_python_value(value), drops_nulls=True)
    if isinstance(value, Mapping):
        return {
            key: plain_value(item, drops_nulls=drops_nulls)
            for key, item in value.items()
            if item is not None or not drops_nulls or (key == "content" and "role" in value)
        }
    if isinstance(value, Sequence):
        return [plain_value(item, drops_nulls=drops_nulls) for item in value]
    if isinstance(value, np.floating):
        return plain_value(float(str(value)))  # the shortest digits, 0.1 also in float32
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if type(value).__name__ in ("NAType", "NaTType"):  # missing values of pandas
        return None
    if hasattr(value, "to_pydatetime"):  # a Timestamp of pandas
        return str(value) if value.nanosecond else value.to_pydatetime()
    if hasattr(value, "to_pytimedelta"):  # a Timedelta of pandas
        return str(value) if value.nanoseconds else value.to_pytimedelta()
    return value


def _python_value(scalar: Any) -> Any:
    """The value of an Arrow scalar as `as_py` gives it; a time with nanoseconds as a text.

    Raises:
        CellError: Python has no such date, time zone or text.
    """
    kind = str(scalar.type)
    try:
        is_fine = kind.startswith("time") and "[ns" in kind and scalar.is_valid
        if is_fine and scalar.value % 1000:  # Python's types have microseconds
            return scalar.cast("string").as_py()
        value = scalar.as_py()
    except (OverflowError, ValueError, LookupError) as failure:
        number = getattr(scalar, "value", None)  # of a date in Arrow
        shown = f" {number}" if isinstance(number, int) else ""
        raise CellError(
            f"the {kind}{shown} has no value in Python ({shortened(str(failure))}); dates need "
            "years from 1 to 9999 and a known time zone; correct it, or leave the column out"
        ) from None
    is_short = kind in ("float", "halffloat")
    return scalar.type.to_pandas_dtype()(value) if is_short and value is not None else value


def printable(value: Any) -> Any:
    """A value for a template: a float that is a whole number becomes an integer.

    So it is printed without ".0", also within lists and objects. Floats from 2**63 on stay, since
    Python prints them with an exponent.

    >>> printable([5.0, 2.5, -0.0, {"n": 3.0}, 1e300])
    [5, 2.5, 0, {'n': 3}, 1e+300]
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, Mapping):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def cell_text(value: Any) -> str:
    """The text of a value. Decimals are written without an exponent.

    >>> cell_text(5.0), cell_text(decimal.Decimal("0E-8"))
    ('5', '0.00000000')
    """
    return format(value, "f") if isinstance(value, decimal.Decimal) else str(printable(value))
