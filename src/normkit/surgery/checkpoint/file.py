"""A safetensors file with a manifest inside: put in place by one rename, and read without running any code in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from normkit.atomic import replacing
from normkit.errors import NormkitError
from normkit.surgery.checkpoint.manifest import FORMAT, is_manifest

# Keys of the file's metadata that are ours. Every other key is the name of a tensor, and its value the name of the
# tensor that it shares its memory with: safetensors' own save_model writes aliases in this way.
_MANIFEST, _FRAMEWORK, _EXTRA = "normkit", "format", "normkit.extra"
_OURS = {_MANIFEST, _FRAMEWORK, _EXTRA}

_PICKLE_ADVICE = (
    "A pickle can run any code when it is opened, so it is never opened here. Convert it, if you trust it: "
    "model.load_state_dict(torch.load(path, weights_only=True)), then nk.save(model, new_path)."
)


class FileError(NormkitError, OSError):
    """A file that cannot be read or written."""


class MissingFileError(FileError, FileNotFoundError):
    """A file that does not exist."""


class CheckpointError(NormkitError, ValueError):
    """A file that is not a checkpoint, or not a whole one; a state that cannot be put into one."""


class Checkpoint(NamedTuple):
    """What a file holds.

    Attributes:
        tensors: by their keys in the model's state.
        extra: by key, what layers keep besides tensors (`get_extra_state`).
        manifest: None in a file that another program wrote.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    manifest: dict[str, Any] | None


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a file; a reader finds the old one or the new one, never a part."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, aliases = _stored_once(checkpoint.tensors)
    metadata = {_FRAMEWORK: "pt", _MANIFEST: json.dumps(checkpoint.manifest), **aliases}
    if checkpoint.extra:
        metadata[_EXTRA] = json.dumps(checkpoint.extra)
    with _replacing(path) as beside:
        beside.touch()
        usual = beside.stat().st_mode  # safetensors makes files that only their owner can read
        try:
            save_file(tensors, beside, metadata)
            beside.chmod(usual)
        except KeyError as error:
            raise CheckpointError(f"safetensors has no type {error}: {_of_type(tensors, error.args[0])}.") from error
        except SafetensorError as error:  # it also wraps the errors of the disk
            raise FileError(f"{path} cannot be written: {error}. What was there before is unchanged.") from error


def read(path: Path) -> Checkpoint:
    """Read a file of ours, or any safetensors file."""
    from safetensors import SafetensorError, safe_open

    _check_is_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dictionary
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off: {error}. Get it again.") from error
    aliases = {name: of for name, of in metadata.items() if name not in _OURS and of in tensors}
    tensors |= {name: tensors[of] for name, of in aliases.items()}
    return Checkpoint(tensors, _parsed(path, metadata, _EXTRA) or {}, _manifest(path, metadata))


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest inside a file, without its tensors; None if another program wrote it."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    _check_is_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            return _manifest(path, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off: {error}. Get it again.") from error


def _manifest(path: Path, metadata: Mapping[str, str]) -> dict[str, Any] | None:
    manifest = _parsed(path, metadata, _MANIFEST)
    if manifest is None:
        return None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has a manifest of format {manifest.get('format')}; this version reads {FORMAT}. Update normkit."
        )
    if not is_manifest(manifest):
        raise CheckpointError(
            f"{path} is damaged: its manifest has no norms, or says too little of them. Get it again."
        )
    return manifest


def _parsed(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, Any] | None:
    try:
        found = json.loads(metadata.get(key, "null"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its {key!r} is not JSON ({error}). Get it again.") from None
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: its {key!r} is a {type(found).__name__}. Get it again.")
    return found


def _check_is_safetensors(path: Path) -> None:
    """Look at the first bytes: 8 with the length of the header, and the brace that the header begins with."""
    try:
        with open(path, "rb") as file:
            start, size = file.read(512), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist.") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length <= size - 8:
        return
    if _looks_pickled(start):
        raise CheckpointError(
            f"{path} is a pickle, as torch.save writes it; needed is a safetensors file. {_PICKLE_ADVICE}"
        )
    if start[8:9] == b"{" and length < 100_000_000:
        raise CheckpointError(f"{path} is cut off: its header alone has {length} bytes, the file {size}. Get it again.")
    raise CheckpointError(
        f"{path} is not a safetensors file: it begins with {start[:8]!r}. Needed is what nk.save writes. "
        f"If it is a pickle: {_PICKLE_ADVICE}"
    )


def _looks_pickled(start: bytes) -> bool:
    """Whether it is torch's zip, its older tar, or a bare pickle, whose protocol shows in its first bytes."""
    return (
        start.startswith(b"PK\x03\x04")
        or start[257:262] == b"ustar"
        or (start[:1] == b"\x80" and start[1:2] <= b"\x05")
    )


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """As `atomic.replacing`, with errors of ours."""
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise MissingFileError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if path.is_dir():
        raise FileError(f"{path} is a folder; needed is the name of a file.")
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        if isinstance(error, NormkitError):
            raise
        raise FileError(f"{path} cannot be written: {error}. What was there before is unchanged.") from error


def _stored_once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, contiguous and without shared memory; and for each alias the name it stands for."""
    first: dict[Any, str] = {}
    stored, aliases = {}, {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        of = first.setdefault(_identity(tensor), name) if tensor.numel() else name
        if of != name and name not in _OURS:
            aliases[name] = of
        else:
            stored[name] = _on_its_own(tensor, memory)
    return stored, aliases


def _of_type(tensors: Mapping[str, Tensor], dtype: object) -> str:
    return ", ".join(name for name, tensor in tensors.items() if tensor.dtype == dtype)


def _identity(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage().data_ptr()
    return tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _on_its_own(tensor: Tensor, memory: set[int]) -> Tensor:
    """The tensor as safetensors takes it: contiguous, on the CPU, and in memory of its own."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    storage = dense.untyped_storage()
    is_a_part = storage.nbytes() != dense.nbytes
    if is_a_part or storage.data_ptr() in memory:
        dense = dense.clone()
    memory.add(dense.untyped_storage().data_ptr())
    return dense
