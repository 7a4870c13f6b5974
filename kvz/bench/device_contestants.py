"""kvz codecs on a GPU as a benchmark sees them, and how one turn of a contestant is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvz.bench.contestants import MAX_LOSS, CodecContestant
from kvz.bench.device_workload import Codebooks, DeviceWorkload
from kvz.codecs.base import Codec, is_progressive
from kvz.formats.errors import ContentMismatch
from kvz.formats.ids import LOSSY_CODECS
from kvz.gpu.bindings import require_binding
from kvz.gpu.device import Device
from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder, max_payload_nbytes

#: Written before every timed encoding: more than any GPU's cache, and long enough to hide launches.
_FLUSH_NBYTES = 512 << 20
_ITEMSIZE = 2


class DeviceContestant(Protocol):
    """Encodes and decodes the same data again and again; ``graph``: may be captured."""

    @property
    def name(self) -> str: ...

    @property
    def is_baseline(self) -> bool: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def graph(self) -> bool: ...

    @property
    def counted_nbytes(self) -> int: ...

    def encode(self) -> None: ...

    def decode(self) -> None: ...

    def stored_nbytes(self) -> int:
        """Bytes that stand for ``counted_nbytes``. Waits for the device."""
        ...

    def read_nbytes(self) -> int:
        """Those that decoding reads. Waits for the device."""
        ...

    def ratio(self) -> float:
        """Bytes of the tensors / bytes read for them. Waits for the device."""
        ...

    def poison(self) -> None: ...

    def is_restored(self) -> bool: ...


class DeviceSpec:
    """A codec to measure; ``label`` is how the user spelled it."""

    def __init__(self, label: str, contestant: CodecContestant) -> None:
        """Raises ConfigError for a codec without GPU kernels."""
        self.label = label
        self.codec = contestant.codec
        self.config = contestant.config
        require_binding(self.codec.name, self.config)


def by_codec(work: DeviceWorkload, codebooks: Codebooks) -> list[tuple[Codec, list[int]]]:
    """The different codecs of a workload's tensors, and the numbers of each one's tensors."""
    groups: dict[str, tuple[Codec, list[int]]] = {}
    for i, name in enumerate(work.book_names):
        codec = codebooks.codecs[name]
        key = json.dumps([codec.name, codec.config_dict()], sort_keys=True)
        groups.setdefault(key, (codec, []))[1].append(i)
    return list(groups.values())


def payload_room(work: DeviceWorkload, codec: Codec, members: Sequence[int]) -> int:
    """Bytes that payloads of these tensors may take."""
    return max_payload_nbytes([work.tensors[i].shape for i in members], codec)


class DeviceCodecContestant:
    """A kvz codec on the tensors of a workload, chunk by chunk as in an archive.

    ``anchor_only``: of a progressive codec, decode the anchors alone.
    """

    is_baseline = False

    def __init__(
        self,
        spec: DeviceSpec,
        work: DeviceWorkload,
        codebooks: Codebooks,
        payloads: torch.Tensor,
        *,
        graph: bool = True,
        anchor_only: bool = False,
    ) -> None:
        self.name = spec.label + (", anchors" if anchor_only else "")
        self.name += "" if graph else ", no graph"
        self.config = spec.config
        self.graph = graph
        self._work = work
        self._encoders: list[DeviceEncoder] = []
        self._decoders: list[DeviceDecoder] = []
        used = 0
        for codec, members in by_codec(work, codebooks):
            room = payload_room(work, codec, members)
            encoder = DeviceEncoder(
                [work.tensors[i] for i in members],
                codec,
                codebooks=[codebooks.books[work.book_names[i]] for i in members],
                payloads=payloads[used : used + room],
            )
            used += room
            self._encoders.append(encoder)
            self._decoders.append(DeviceDecoder.of(encoder, [work.outputs[i] for i in members]))
        self._codec = spec.codec
        self._anchor_only = anchor_only
        #: Of a lossy codec: what the first round gave.
        self._first_outputs: list[torch.Tensor] | None = None

    @property
    def counted_nbytes(self) -> int:
        return self._work.nbytes

    def encode(self) -> None:
        for encoder in self._encoders:
            encoder.encode()

    def decode(self) -> None:
        for decoder in self._decoders:
            if self._anchor_only:
                decoder.decode_draft()
            else:
                decoder.decode()

    def stored_nbytes(self) -> int:
        return sum(sum(encoder.payload_nbytes()) for encoder in self._encoders)

    def read_nbytes(self) -> int:
        residuals = 0
        if self._anchor_only and is_progressive(self._codec):
            chunks = [chunk for encoder in self._encoders for chunk in encoder.chunks]
            residuals = sum(self._codec.residual_nbytes(chunk.shape) for chunk in chunks)
        return self.stored_nbytes() - residuals

    def ratio(self) -> float:
        return self.counted_nbytes / self.read_nbytes()

    def poison(self) -> None:
        self._work.poison_outputs()

    def is_restored(self) -> bool:
        """A lossy codec must give what it gave in the first round, near the input."""
        for decoder in self._decoders:
            decoder.check()
        if self._codec.name not in LOSSY_CODECS:
            return self._work.is_restored()
        if self._first_outputs is None:
            self._first_outputs = [output.clone() for output in self._work.outputs]
            return self._work.relative_error() < MAX_LOSS
        return self._work.equals(self._first_outputs)


class Timer:
    """Times work on the device: events around it, launches hidden behind work before it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flush = device.empty(0 if device.interpreted else _FLUSH_NBYTES)

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds that ``work`` takes on the device."""
        start, end = self._device.marker(), self._device.marker()
        # also empties the cache
        self._flush.fill_(1)
        start.record()
        work()
        end.record()
        self._device.synchronize()
        return end.seconds_since(start)

    def prepared(self, work: Callable[[], None], graph: bool) -> Callable[[], None]:
        """``work`` compiled, and as one graph launch if it may be captured."""
        work()
        self._device.synchronize()
        if not graph or self._device.interpreted:
            return work
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        return captured.replay


class Turns:
    """Seconds of each round of one contestant."""

    def __init__(self, contestant: DeviceContestant, timer: Timer, where: str) -> None:
        self.contestant = contestant
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self._where = where
        self._timer = timer
        self._encode = timer.prepared(contestant.encode, contestant.graph)
        self._decode = timer.prepared(contestant.decode, contestant.graph)

    def take(self) -> None:
        """One round. Raises ContentMismatch when an element is not restored."""
        encode_s = self._timer.seconds(self._encode)
        self.contestant.poison()
        decode_s = self._timer.seconds(self._decode)
        if not self.contestant.is_restored():
            raise ContentMismatch(
                f"{self._where}: {self.contestant.name} does not restore its input"
            )
        self.encode_s.append(encode_s)
        self.decode_s.append(decode_s)
