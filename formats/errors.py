"""Typed errors: one class for each kind of thing that can be wrong with a file or a request.

A message names the file or field, what is wrong with it and, where there is one, the limit or the
expected value. The command line turns each branch of the tree into one documented exit code.
"""

from __future__ import annotations


class KvzError(Exception):
    """Base of every error that kvz raises on purpose.

    ``file``: what the error is about, once that is known; it then leads the message.
    """

    file: str | None = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.file is None else f"{self.file}: {message}"


class FormatError(KvzError):
    """The bytes are not something this version can decode."""


class NotKvzFile(FormatError):
    """The file does not start with the kvz magic."""


class NotSafetensorsFile(FormatError):
    """The file is not a readable safetensors file."""


class NotCodebookFile(FormatError):
    """The file is not one that ``kvz calibrate`` wrote."""


class UnsupportedVersion(FormatError):
    """The file needs a newer reader."""


class UnsupportedFeature(FormatError):
    """The file sets a required-feature bit that this reader does not know."""


class UnknownCodec(FormatError):
    """The file names a codec that this reader does not know."""


class UnsupportedCache(FormatError):
    """A cache holds a layer that kvz cannot store exactly."""


class DamagedFile(KvzError):
    """The file is a kvz file, but its bytes contradict themselves."""


class TruncatedFile(DamagedFile):
    """The file ends before the bytes that it promises."""


class ChecksumMismatch(DamagedFile):
    """A checksum does not match its bytes."""


class InvalidField(DamagedFile):
    """A field holds a value that the specification forbids."""


class LimitExceeded(DamagedFile):
    """A size or count in the file exceeds the cap of this reader."""


class MismatchError(KvzError):
    """Two things that must agree do not."""


class IdentityMismatch(MismatchError):
    """The cache belongs to another model, other tokens or only a part of the heads."""


class ContentMismatch(MismatchError):
    """Decoded tensors differ from those they are compared with."""


class SourceError(KvzError):
    """An input cannot be read, or an output cannot be written."""


class ModelLoadError(SourceError):
    """A model cannot be found or loaded."""


class ConfigError(KvzError):
    """An option or argument has a value that makes no sense."""
