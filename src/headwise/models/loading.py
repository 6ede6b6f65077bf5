"""Loading: a hub id, a directory, a GGUF file or the word `patient` becomes a model in eval mode.

Weights come from safetensors or GGUF; pickles and remote code only on request. A wrong path, a
cut-off file, a missing tokenizer and a NaN weight each have their own message, before any work.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from headwise.artefacts import TEMPORARY, is_there, read_json, require_regular, to_json, write_text
from headwise.errors import HeadwiseError, ModelError, reported_as
from headwise.models.architectures import architecture_of, is_packed, require_groups
from headwise.models.conversions import SOURCE, WEIGHTS, cache_folder, make_room
from headwise.models.description import keep_fingerprint
from headwise.models.first_token import decide_first_token
from headwise.models.loaded_model import LoadedModel
from headwise.models.offloading import held_tensor, plain_parts
from headwise.models.patient import empty_patch_path
from headwise.models.settings import LoadSettings, model_path
from headwise.models.stored_weights import empty_model, stored_weights
from headwise.models.tensor_files import StoredTensor, stored_tensors
from headwise.values import MOST

Options = dict[str, str | bool | None]  # of `from_pretrained`
_ROOM = 0.8  # of free memory that weights may take; the rest is for the work
_PATIENCE = 3.0  # seconds until the hub counts as out of reach


def load_model(
    name: str,
    *,
    dtype: str | None = None,
    device_map: str | Mapping[str, str | int] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    bos: bool | None = None,
    tokenizer: str | None = None,
    stream: bool | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; float32 on CPU, bfloat16 on an accelerator by default.

    `device_map` is what transformers takes, or a .json file with it. `bos` says whether texts start
    with a BOS; without it that is decided here. `tokenizer` is where the tokenizer is, if not
    beside the weights. `stream` leaves the weights in their files, from which they are read layer
    by layer; by default that is done if they do not fit into memory.
    """
    LoadSettings(dtype=dtype)  # refuses one that is unknown
    path = model_path(name)
    options: Options = {"trust_remote_code": trust_remote_code}
    source: str = str(path) if is_there(path) else name
    if path.suffix == ".gguf":
        source = str(converted_gguf(path))
    elif not path.exists():
        _require_hub(name)
    if path.is_dir():
        _require_sound_folder(path)
    with quietly():
        _require_config(source, options)
        words = _load_tokenizer(tokenizer or source, options)
        if _streams(path, dtype, device_map, stream):
            model = _streamed_weights(path, options, dtype)
        else:
            model = _load_weights(source, options, dtype, device_map, allow_pickle)
    architecture_of(model)
    require_groups(model)
    if not is_packed(model):
        _forget_quantization(model)
    keep_fingerprint(model)
    if name == "patient-empty":
        from headwise.models.patch import Patch  # late: other models need no patch

        Patch.load(empty_patch_path()).apply(model, force=True)  # in any precision
    if stored_weights(model) is None:  # else each layer is looked at when it is read
        require_finite(model)
    model.eval()
    return LoadedModel(name, model, words, decide_first_token(model, words, bos))


def _require_config(source: str, options: Options) -> None:
    """Tell a config that cannot be used as such: the tokenizer reads it too, and comes first."""
    with reported_as(
        ModelError,
        "its config cannot be used",
        where=source,
        fix="check the name or path, and its config.json; a model with its own code needs "
        "--trust-remote-code",
    ):
        AutoConfig.from_pretrained(source, **options)


def _streams(
    path: Path,
    dtype: str | None,
    device_map: str | Mapping[str, str | int] | None,
    stream: bool | None,
) -> bool:
    """Whether the weights stay in their files: asked for, or larger than memory."""
    if stream is None:
        return path.is_dir() and device_map is None and _too_large(path, dtype)
    if stream and not any(path.glob("*.safetensors")):
        raise ModelError(
            "only a directory with safetensors files can be streamed",
            where=path,
            fix="download or convert the model into a directory first",
        )
    return stream


def _stream_type(stored: Mapping[str, StoredTensor], dtype: str | None) -> torch.dtype:
    """The precision asked for; `auto` is that of the largest tensor."""
    if dtype == "auto" and stored:
        return max(stored.values(), key=lambda tensor: tensor.numel).dtype
    precision: torch.dtype = getattr(torch, dtype or "float32", torch.float32)
    return precision


def _too_large(path: Path, dtype: str | None) -> bool:
    """Whether the weights, in the precision asked for, leave no memory to work in."""
    stored = stored_tensors(path)
    needed = sum(tensor.numel for tensor in stored.values()) * _stream_type(stored, dtype).itemsize
    return needed > _ROOM * free_memory()


def _streamed_weights(path: Path, options: Options, dtype: str | None) -> PreTrainedModel:
    what, fix = "the model could not be loaded", "check its config.json"
    with reported_as(ModelError, what, where=path, fix=fix):
        model = empty_model(path, _stream_type(stored_tensors(path), dtype), **options)
    _require_heads(model, str(path))
    return model


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its own limit if any."""
    free: int = psutil.virtual_memory().available
    process = psutil.Process()
    if not hasattr(process, "rlimit"):  # macOS and Windows
        return free
    limit: int = process.rlimit(psutil.RLIMIT_AS)[0]
    if limit == psutil.RLIM_INFINITY:
        return free
    taken: int = process.memory_info().vms
    return min(free, limit - taken)


def converted_gguf(path: Path) -> Path:
    """A GGUF file as a model directory: de-quantised once, kept under the hash of its bytes.

    De-quantising takes longer than everything else about loading (half a minute for 135 M weights).
    """
    folder = cache_folder() / _file_hash(path)
    if not (folder / SOURCE).exists():
        _convert_gguf(path, folder)
        make_room(folder)
    if read_json(folder / SOURCE).get("weights_sha256") != _file_hash(folder / WEIGHTS):
        raise ModelError(
            "the converted copy of this GGUF file is damaged",
            where=folder,
            fix="run `headwise cache --clear`; it is made again from the .gguf file",
        )
    with suppress(OSError):  # a cache that others own can still be read
        (folder / SOURCE).touch()
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    options: Options = {"gguf_file": path.name}
    with quietly():
        tokenizer = _load_tokenizer(str(path.parent), options)
        model = _load_weights(str(path.parent), options, "float32", None, False)
    _forget_quantization(model)
    # complete before it has its name: another process may look for it, or convert it too
    half = folder.with_name(f"{folder.name}.{os.getpid()}{TEMPORARY}")
    try:
        with quietly():
            model.save_pretrained(half, max_shard_size="1TB")
            tokenizer.save_pretrained(half)
        config = half / "tokenizer_config.json"
        write_text(config, to_json({**read_json(config), "add_bos_token": _asks_for_bos(path)}))
        source = {"file": path.name, "weights_sha256": _file_hash(half / WEIGHTS)}
        write_text(half / SOURCE, to_json(source))
        shutil.rmtree(folder, ignore_errors=True)
        half.rename(folder)
    except (OSError, SafetensorError, HeadwiseError) as error:
        if (folder / SOURCE).exists():
            return  # another process was first
        size = sum(parameter.nbytes for parameter in model.parameters())
        raise ModelError(
            f"the de-quantised model cannot be kept ({str(error)[:200]}): it takes "
            f"{size / 1e9:.1f} GB",
            where=folder.parent,
            fix="free disk space (`headwise cache` shows what is kept there), or set "
            "HEADWISE_CACHE to a folder with room",
        ) from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _asks_for_bos(path: Path) -> bool:
    """What the file says about its tokenizer; False is also what it says by habit."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def _load_tokenizer(source: str, options: Options) -> PreTrainedTokenizerBase:
    with reported_as(
        ModelError,
        "no tokenizer could be loaded",
        where=source,
        fix="check the model name or path; a local model directory needs tokenizer.json",
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise ModelError(
            f"its tokenizer's model_max_length is {tokenizer.model_max_length!r}, not a number",
            where=source,
            fix="correct tokenizer_config.json",
        )
    return tokenizer


def _load_weights(
    source: str,
    options: Options,
    dtype: str | None,
    device_map: str | Mapping[str, str | int] | None,
    allow_pickle: bool,
) -> PreTrainedModel:
    chosen = dtype or ("bfloat16" if device_map and torch.cuda.is_available() else "float32")
    if "gguf_file" not in options:
        options = {**options, "use_safetensors": None if allow_pickle else True}
    with (
        reported_as(
            ModelError,
            "the model could not be loaded",
            where=source,
            fix="check the name and its config.json; pickled weights need --allow-pickle, remote\n"
            "code its own flag, --device-map cuda a GPU",
        ),
        reported_as(
            ModelError,
            "config and weights do not fit together",
            RuntimeError,
            where=source,
            fix="use the config.json that belongs to these weights",
        ),
        reported_as(
            ModelError,
            "the weight file is damaged or cut off",
            SafetensorError,
            EOFError,
            struct.error,
            where=source,
            fix="download or copy the weights again",
        ),
    ):
        loaded: Any = _from_pretrained(
            source,
            dtype=getattr(torch, chosen, chosen),
            device_map=_places(device_map),
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel
    model, report = loaded
    _require_complete(report["missing_keys"], source)
    _require_heads(model, source)
    return model


def _from_pretrained(source: str, **options: Any) -> Any:
    """A config may ask for an attention kernel that is not installed; others compute the same."""
    try:
        return AutoModelForCausalLM.from_pretrained(source, **options)
    except (ImportError, ValueError) as error:
        if not re.search("FlashAttention|attn_implementation", str(error)):
            raise
    config = AutoConfig.from_pretrained(source, trust_remote_code=options["trust_remote_code"])
    try:
        config._attn_implementation = "sdpa"  # an option would lose against what was saved
        return AutoModelForCausalLM.from_pretrained(source, config=config, **options)
    except ValueError:  # not every family has it
        config._attn_implementation = "eager"
        return AutoModelForCausalLM.from_pretrained(source, config=config, **options)


def _places(device_map: str | Mapping[str, str | int] | None) -> str | dict[str, str | int] | None:
    """Where modules go: a word such as `auto`, or a module -> device table, perhaps in a file."""
    if isinstance(device_map, str):
        return dict(read_json(Path(device_map))) if device_map.endswith(".json") else device_map
    return None if device_map is None else dict(device_map)


def _require_heads(model: PreTrainedModel, source: str) -> None:
    """transformers builds a model of no layers without a word."""
    config = model.config.get_text_config()
    least = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), 1)
    for name, fewest in {**least, "vocab_size": 1, "max_position_embeddings": 2}.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value < fewest:
            raise ModelError(
                f"its config has {name} {value}", where=source, fix="correct its config.json"
            )


def _require_complete(missing: Iterable[str], source: str) -> None:
    """transformers fills what is missing with random numbers; that would be measured as a head."""
    names = sorted(missing)
    if names:
        raise ModelError(
            f"the weight file has no weights for {names[0]}"
            + (f" and {len(names) - 1} others" if len(names) > 1 else ""),
            where=source,
            fix="use a complete checkpoint of a causal language model",
        )


def _require_hub(name: str) -> None:
    """Refuse a hub id at once if it is not in the local cache and the hub cannot be reached.

    transformers itself would try again and again for minutes.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ModelError(
            "no such model directory, nor a hub id", where=name, fix="check the name"
        ) from None
    if isinstance(cached, str) or (not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)):
        return
    raise ModelError(
        f"offline: {constants.ENDPOINT} cannot be reached, and this model is not in the cache",
        where=name,
        fix="pass a local model directory or a .gguf file, or check the network",
    )


def _answers(endpoint: str) -> bool:
    """Whether a host takes connections; behind a proxy only the proxy knows."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(endpoint)
    try:
        socket.create_connection((address.hostname, address.port or 443), _PATIENCE).close()
    except OSError:
        return False
    return True


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' loading bars and notes off the terminal; errors still come as errors."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader draws its bar with bare tqdm
            yield
    finally:
        hf_logging.set_verbosity(level)


def _forget_quantization(model: PreTrainedModel) -> None:
    """A de-quantised GGUF model is an ordinary one, but transformers refuses to save it as such."""
    if getattr(model, "hf_quantizer", None) is not None:
        vars(model).update(hf_quantizer=None, is_quantized=False)
        model.config.__dict__.pop("quantization_config", None)


def require_finite(model: PreTrainedModel) -> None:
    """Refuse a model with NaN or infinite weights, naming the first one."""
    for name, _ in model.named_parameters():
        parts = plain_parts(held_tensor(model, name))
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise ModelError(
                f"weights hold NaN or infinity, first in {name}",
                where=model.config._name_or_path or model.config.model_type,
                fix="use an undamaged checkpoint; a half-precision conversion may have overflowed",
            )


# --- before transformers is let at a folder: it builds what a config says, then reads weights -----

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_key_value_heads")
_COUNTS = (*_LAYERS, *_HEADS, "num_labels", "num_experts", "num_local_experts", "n_routed_experts")


def _require_sound_folder(folder: Path) -> None:
    """Refuse a model directory with a pipe for a file, or a config of absurd counts."""
    for part in (folder, *folder.iterdir()):
        if is_there(part):
            require_regular(part)
    path = folder / "config.json"
    if not is_there(path):
        return  # an adapter, or nothing: transformers says which
    layers = 0
    for name, value in _counts(read_json(path)):
        if value > MOST:
            raise ModelError(
                f"its config has {name} {value:,}", where=path, fix="correct its config.json"
            )
        layers = max(layers, value if name in _LAYERS else 0)
    stored = len(stored_tensors(folder))
    if stored and layers > stored:
        raise ModelError(
            f"its config has {layers:,} layers, its weight files hold {stored:,} tensors",
            where=path,
            fix="use the config.json that belongs to these weights",
        )


def _counts(body: Mapping[str, object], depth: int = 0) -> Iterator[tuple[str, int]]:
    """The counts of a config and of the configs inside it."""
    for name, value in body.items():
        if name in _COUNTS and isinstance(value, int):
            yield name, value
        elif isinstance(value, Mapping) and depth < 3:
            yield from _counts(value, depth + 1)
