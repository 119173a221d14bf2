"""`.pt` files: what they hold, read without running code, and no larger than the file."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch.load raises; nothing is unpickled
from typing import Any

from xtok.errors import MAP_HINT, MapFileError
from xtok.maps.tensors import require_valid


def load_pt(path: Path, source: Path) -> Any:
    """Return what a `.pt` file holds; its tensors are views of the file, not of memory.

    Mapped storages cannot grow, so that no tensor takes memory for what a file only claims.

    Args:
        path: where its bytes are.
        source: what messages call it.

    Raises:
        MapFileError: if it holds more than tensors, numbers and strings, or is damaged.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED for m in members):
                raise ValueError("it is compressed, which torch.save does not do")
            if sum(m.file_size for m in members) > path.stat().st_size:
                raise ValueError("it claims to hold more than it has bytes")
            part = archive.testzip()  # PyTorch does not check it; it takes 4 ms of 41
            require_valid(part is None, f"the checksum of its part {part}")
        # Sparse tensors are checked when it is known that they are no larger than the file.
        unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
        with unchecked, warnings.catch_warnings():
            # CSR is said to be beta; newer versions say that their check of it takes time.
            warnings.filterwarnings("ignore", "Sparse C|Validating sparse", UserWarning)
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UnpicklingError as error:
        # PyTorch's own text recommends to load the file in a way that runs its code.
        raise MapFileError(
            f"{source} is damaged, or holds more than tensors, which could run code",
            hint="save only tensors, numbers and strings in it, or a dict of counts "
            "{(student_id, teacher_id): number}, or make it again",
        ) from error
    except Exception as error:
        raise MapFileError(f"{source} is not a whole .pt file: {error}", hint=MAP_HINT) from error
