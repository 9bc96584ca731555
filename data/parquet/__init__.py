"""Parquet: data.path is a file, a folder of them, or a pattern; the column data.text_field holds a text in each row.

Every row is a document, held out by the hash of its number. Texts that are null or empty are left out and counted.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt.documents import Skipped, Source
from gpt.errors import DataError
from gpt.schema import DataConfig
from gpt.sources import Files, in_blocks, located, path_label, stream

KEYS = {"path", "text_field"}
SUFFIXES = (".parquet", ".pq")
ALLOWED = f"a Parquet file, a folder of them, or a pattern ({' '.join(SUFFIXES)})"
ROWS = 64  # that are read at a time: some have books in each


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED), config.text_field)


def source(config: DataConfig) -> Source:
    path = located(config, ALLOWED)
    files = Files(path, SUFFIXES, ALLOWED)
    return Source(
        str(path),
        files.fingerprint() | {"text_field": config.text_field},
        lambda start: stream(lambda first: texts(files.paths.values(), config.text_field, first), start, config),
        files.skipped,
        lambda: text_size(files.paths.values(), config.text_field),
    )


def text_size(paths: Iterable[Path], field: str) -> int:
    """Bytes of a column, about: as they are before they are compressed, which a dictionary may have made few."""
    size = 0
    for path in paths:
        with opened(path, field) as file:
            for group in map(file.metadata.row_group, range(file.num_row_groups)):
                columns = map(group.column, range(group.num_columns))
                size += sum(one.total_uncompressed_size for one in columns if one.path_in_schema == field)
    return size


def texts(paths: Iterable[Path], field: str, start: int) -> Iterator[Iterable[str] | Skipped]:
    """The rows of all files, from number `start` on."""
    for path in paths:
        yield from read(path, field, start)
        start = max(0, start - n_rows(path, field))


def n_rows(path: Path, field: str) -> int:
    with opened(path, field) as file:
        return file.metadata.num_rows


def opened(path: Path, field: str):
    """The open file. Raises DataError where it is no Parquet file or has no such column of texts."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({str(error)[:100]})") from None
    if field not in file.schema_arrow.names:
        raise DataError(f"{path}: has no column {field!r}; allowed as data.text_field: {file.schema_arrow.names}")
    kind = file.schema_arrow.field(field).type
    if pyarrow.types.is_dictionary(kind):  # a categorical column
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise DataError(f"{path}: column {field!r} holds {kind}, allowed: string")
    return file


def read(path: Path, field: str, start: int = 0) -> Iterator[Iterable[str] | Skipped]:
    """The text of each row from `start` on, in blocks. Raises DataError naming the file and the row."""
    import pyarrow

    row = 0
    try:
        with opened(path, field) as file:
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= start:
                    row += size
                    continue
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        if row >= start:
                            text = value.as_py()
                            yield in_blocks(text) if text else Skipped("empty texts")
                        row += 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: row {row:,} cannot be read ({str(error)[:100]})") from None
