"""The seam to transformers: loading, cache layers, one forward pass, the attention function.

Everything that differs between versions of transformers is found out here by looking at the
objects at hand, never by version number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvz.capture_metadata import LayerRecord
from kvz.formats.errors import ConfigError, InvalidField, ModelLoadError, UnsupportedCache

if TYPE_CHECKING:
    import torch

# record(attention module, query, key, softmax scale, soft cap or None)
RecordFn = Callable[[Any, "torch.Tensor", "torch.Tensor", float, "float | None"], None]

_CACHE_ARGUMENTS = ("past_key_values", "cache")
_LOGITS_ARGUMENTS = ("logits_to_keep", "num_logits_to_keep")
# Far above the context of any model; a file must not make the buffers of a cache arbitrarily long.
_MAX_CACHE_LEN = 1 << 24
# State that a restored cache would lack, as in RecurrentGemma.
_MODULE_STATE = re.compile(r"(recurrent|conv\w*|ssm|rnn)_states?")


def load_model(
    spec: str, *, dtype: str = "bfloat16", device: str = "cpu", gguf_file: str | None = None
) -> tuple[Any, Any]:
    """Model in evaluation mode and its tokenizer.

    spec: local folder, hub id, or path of a `.gguf` file. gguf_file: name of a GGUF file inside
    the folder or repository; its weights are dequantised to `dtype`.
    Raises ModelLoadError when transformers is missing or the model cannot be found or read.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelLoadError(f"{error}; models need: pip install 'kvz[hf]'") from None
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ModelLoadError(f"dtype {dtype!r} is not a floating-point dtype such as bfloat16")
    source, gguf_file = _resolve_spec(spec, gguf_file)
    options: dict[str, Any] = {}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        if gguf_file is not None and hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch_dtype, **options
        )
        model = model.to(torch.device(device)).eval()
    except Exception as error:  # the hub client, tokenizers and gguf raise classes of their own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(f"cannot load model {spec}: {reason[0]}") from error
    return model, tokenizer


def _resolve_spec(spec: str, gguf_file: str | None) -> tuple[str, str | None]:
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"cannot load model {spec}: no such file")
        return str(path.parent), path.name
    if path.is_dir():
        if gguf_file is not None and not (path / gguf_file).is_file():
            raise ModelLoadError(f"cannot load model {spec}: no file {gguf_file} in that folder")
        if gguf_file is None and not (path / "config.json").is_file():
            raise ModelLoadError(f"cannot load model {spec}: no config.json in that folder")
        return str(path), gguf_file
    # a hub id is a name or owner/name; everything else was meant as a path
    if path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise ModelLoadError(f"cannot load model {spec}: no such folder")
    return spec, gguf_file


def check_model(model: Any) -> None:
    """Refuse a model that kvz cannot prefill. Raises UnsupportedCache naming it."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedCache(
            f"{name} is an encoder-decoder model: run it yourself and use kvz.capture_cache"
        )
    takes_default = getattr(model, "_supports_default_dynamic_cache", None)
    if takes_default is not None and not takes_default():
        raise UnsupportedCache(f"{name} does not keep its state in a DynamicCache")
    if _argument(model, _CACHE_ARGUMENTS) is None:
        raise UnsupportedCache(f"{name}.forward takes none of {', '.join(_CACHE_ARGUMENTS)}")
    for module in model.modules():
        for attribute in vars(module):
            if _MODULE_STATE.fullmatch(attribute):
                raise UnsupportedCache(
                    f"{name} keeps {attribute} in {type(module).__name__}, not in its cache"
                )


def new_cache(model: Any) -> Any:
    """The empty cache that the model would make for itself, all of its layers known to kvz.

    Raises UnsupportedCache naming the first layer that kvz cannot store exactly, or the model
    when it does not keep its state in a DynamicCache.
    """
    if not model.config.is_encoder_decoder:
        check_model(model)
        return _model_cache(model)
    from transformers import EncoderDecoderCache

    return EncoderDecoderCache(_model_cache(model), _model_cache(model))


def _model_cache(model: Any) -> Any:
    from transformers import DynamicCache

    try:
        cache = DynamicCache(config=model.config)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        name = type(model).__name__
        raise UnsupportedCache(f"no DynamicCache for {name}: {error!r}") from error
    if not getattr(cache, "layers", None):
        raise UnsupportedCache("DynamicCache has no layers known before its first use")
    return cache


def cache_layers(cache: Any) -> tuple[LayerRecord, ...]:
    """Kind, window and token counts of every layer of a cache, cross-attention last.

    Raises UnsupportedCache naming index and class of the first layer that kvz does not know.
    """
    from kvz.layers.containers import layer_objects
    from kvz.layers.table import read_layer

    layers = layer_objects(cache)
    return tuple(read_layer(layer, i, None)[0] for i, layer in enumerate(layers))


def make_cache(model: Any, container: Mapping[str, Any], num_layers: int) -> Any:
    """An empty cache of the described class for a model.

    num_layers: of a cache that gets its layers when they are first used. Raises UnsupportedCache
    when this transformers cannot make it, InvalidField for a description without sense.
    """
    import transformers

    name = container.get("class")
    config = model.config
    if name == "EncoderDecoderCache":
        num_self = container.get("num_self_layers")
        own, cross = container.get("self"), container.get("cross")
        parts = [p.get("class") if isinstance(p, Mapping) else None for p in (own, cross)]
        if type(num_self) is not int or not {name, None}.isdisjoint(parts):
            raise InvalidField("kvz metadata: an EncoderDecoderCache lacks its self or cross part")
        return transformers.EncoderDecoderCache(
            make_cache(model, own or {}, num_self),
            make_cache(model, cross or {}, num_layers - num_self),
        )
    if name == "DynamicCache" and container.get("lazy"):
        cache = transformers.DynamicCache()
        cache.layers.extend(transformers.cache_utils.DynamicLayer() for _ in range(num_layers))
        return cache
    if name == "DynamicCache":
        return _model_cache(model)
    options = {key: value for key, value in container.items() if key != "class"}
    length = options.get("max_cache_len", 1)
    if type(length) is not int or not 0 < length <= _MAX_CACHE_LEN:
        raise InvalidField(
            f"kvz metadata: max_cache_len must be 1 to {_MAX_CACHE_LEN}, got {length!r}"
        )
    if name not in ("StaticCache", "QuantizedCache"):
        raise UnsupportedCache(f"the file holds a {name}, which kvz does not know")
    try:
        return getattr(transformers, str(name))(config=config, **options)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise UnsupportedCache(f"no {name} for {type(model).__name__}: {error}") from error


def layer_devices(model: Any, num_layers: int) -> list[torch.device]:
    """Device of each cache layer, for a model that may be spread over several."""
    devices = [model.device] * num_layers
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < num_layers:
            with suppress(StopIteration):
                devices[index] = next(module.parameters()).device
    return devices


def position_ids(attention_mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """RoPE positions of columns start:stop, `[batch, stop - start]` int64; padding gets 0."""
    return (attention_mask[:, :stop].cumsum(-1) - 1).clamp_min(0)[:, start:stop]


def feed(
    model: Any, cache: Any, token_ids: torch.Tensor, attention_mask: torch.Tensor, start: int
) -> torch.Tensor:
    """One forward pass that grows `cache`; the logits after the last token, `[batch, vocab]`.

    Arguments and errors: see `feed_for_logits`.
    """
    return feed_for_logits(model, cache, token_ids, attention_mask, start, 1)[:, -1]


def feed_for_logits(
    model: Any,
    cache: Any,
    token_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    start: int,
    num_logits: int,
) -> torch.Tensor:
    """One forward pass that grows `cache`; the logits after each of the last `num_logits` tokens.

    token_ids: `[batch, n]` int64, the next n tokens. attention_mask: `[batch, >= start + n]`
    int64 over all columns, those already seen included; further columns are ignored. start:
    tokens that the cache has seen, which it may not know itself. Returns
    `[batch, num_logits, vocab]`.
    Raises UnsupportedCache when the model does not work on the cache it is given, ConfigError
    when it is in training mode.
    """
    import torch

    if model.training:
        raise ConfigError("model is in training mode: call model.eval() first")
    num_tokens = token_ids.shape[1]
    stop = start + num_tokens
    arguments: dict[str, Any] = {"input_ids": token_ids, "use_cache": True}
    arguments[_argument(model, _CACHE_ARGUMENTS) or _CACHE_ARGUMENTS[0]] = cache
    # no mask where nothing is masked: the attention kernels then take their causal fast path
    mask = attention_mask[:, :stop]
    arguments["attention_mask"] = None if bool(mask.all()) else mask
    if _argument(model, ("position_ids",)) is not None:
        arguments["position_ids"] = position_ids(attention_mask, start, stop)
    logits_argument = _argument(model, _LOGITS_ARGUMENTS)
    if logits_argument is not None:
        arguments[logits_argument] = num_logits
    before = _length(cache)
    with torch.no_grad():
        output = model(**arguments)
    if not _has_grown(cache, before, num_tokens):
        raise UnsupportedCache(f"{type(model).__name__} does not grow the cache it is given")
    logits: torch.Tensor = output.logits[:, -num_logits:]
    return logits


def _length(cache: Any) -> int | None:
    """Tokens in the first attention layer; None for a cache of recurrent states alone."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def _has_grown(cache: Any, before: int | None, num_tokens: int) -> bool:
    after = _length(cache)
    if before is None or after is None:
        return bool(cache.has_previous_state())
    return after - before == num_tokens


def _argument(model: Any, names: tuple[str, ...]) -> str | None:
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return next((name for name in names if name in parameters), None)


@contextmanager
def recording_attention(model: Any, record: RecordFn) -> Iterator[None]:
    """While open, `record` sees query and key of each attention of `model` before it runs.

    Wraps the registered attention functions under their own names, so that masks and the
    model's settings stay as they are. A model that does not call its attention through
    transformers' registry runs unrecorded.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

    modules = {id(module) for module in model.modules()}
    configs = [getattr(module, "config", None) for module in model.modules()]
    names = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
    local = getattr(REGISTRY, "_local_mapping", {})
    overridden = {name: local[name] for name in names if name in local}
    for name in names:
        REGISTRY[name] = _recording(REGISTRY.get(name), modules, record)
    try:
        yield
    finally:
        for name in names:
            del REGISTRY[name]
        for name, function in overridden.items():
            REGISTRY[name] = function


def _recording(stock: Any, modules: set[int], record: RecordFn) -> Callable[..., Any]:
    def attention(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in modules:
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            record(module, query, key, scale, kwargs.get("softcap"))
        # "eager" is not in the registry: each modelling file has its own
        function = stock or modelling_global(module, "eager_attention_forward")
        return function(module, query, key, *args, **kwargs)

    return attention


def modelling_global(module: Any, name: str) -> Any:
    """A global of the file that implements a module's forward; None when it has none."""
    return inspect.unwrap(type(module).forward).__globals__.get(name)
