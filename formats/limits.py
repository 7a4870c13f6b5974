"""Caps on everything that is read from a file, in one place.

They bound what a hostile or damaged file can make a reader allocate or loop over, and lie far above
what a real cache needs. A file beyond one of them is rejected with :class:`LimitExceeded`.
"""

from __future__ import annotations

#: A head lists tensors (about 110 bytes each) and carries the metadata of the capture.
MAX_HEAD_NBYTES = 64 << 20
#: 1,000 layers with 100 tensors each, ten times over.
MAX_TENSORS = 1 << 20
MAX_NAME_LEN = 1024
MAX_RANK = 8
#: Keeps every product of sizes that passes the check of ``MAX_TENSOR_NBYTES`` inside 64 bits.
MAX_TENSOR_NBYTES = 1 << 48
#: A chunk is decoded in memory; the writer aims at 1 MiB.
MAX_CHUNK_NBYTES = 256 << 20
#: Index entries take 32 bytes: a full index is 512 MiB and describes an archive of 16 TiB.
MAX_SECTIONS = 1 << 24
#: A codebook holds at most three bytes for every channel of every head.
MAX_CODEBOOK_NBYTES = 64 << 20
