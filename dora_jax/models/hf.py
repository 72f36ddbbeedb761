"""Hugging Face folders <-> params: config.json, safetensors (one file or several with an index), tokenizer files.

Consumes a folder; `load` produces stacked params on their shards, each device's slice read from disk on its own, one
parameter at a time, so that the tree is never held twice. `save` writes a folder that transformers (4 and 5)
and servers load. `load_scorer` reads a reward model: the same body under a head `score.weight`. Laws: everything that
can be wrong with a folder is found before device memory is touched; on disk weights are [out, in], in memory [in, out];
a folder appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from dora_jax.models import decoder, linear_attention, packed, sharding
from dora_jax.models.families import TEXT, family
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.family import Tensor
from dora_jax.models.hf_config import config_json, read_config, read_json
from dora_jax.models.packed import Tensors
from dora_jax.models.tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = ["check", "check_vacant", "load", "load_scorer", "read_config", "save"]

END_TENSORS = {
    "embed": Tensor("model.embed_tokens.weight", False),
    "final_norm": Tensor("model.norm.weight", False),
    "lm_head": Tensor("lm_head.weight"),
    "per_layer_embed": Tensor("model.embed_tokens_per_layer.weight", False),
    "per_layer_proj": Tensor("model.per_layer_model_projection.weight"),
    "per_layer_norm": Tensor("model.per_layer_projection_norm.weight", False),
}
WIDE = ("router_bias", *linear_attention.WIDE)  # f32 in every folder
SCORE = "score.weight"  # of a reward model: [1, D]
TEXT_PREFIX = re.compile(r"(language_model\.model|model\.language_model)\.|language_model\.(?=lm_head)")
TOWERS = ("visual.", "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.")
BESIDE = (*TOWERS, *(f"model.{name}" for name in TOWERS))
DISK_DTYPES = ("F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30
MOST_NAMED = 3  # parameters, in a sentence

Bounds = tuple[tuple[int, int], ...]  # half-open, one a dimension


def check(path: str | Path, *, scorer: bool = False) -> ModelConfig:
    """The config of a folder that `load` will take; ValueError names the first file that it will not. scorer: that
    `load_scorer` will take; its tokenizer is not looked at."""
    cfg, tokenizer_file = read_config(path, scorer=scorer), Path(path) / "tokenizer.json"
    if tokenizer_file.is_file() and not scorer:
        tokenizer = Tokenizer.load(Path(path))
        needed = max(tokenizer.vocab_size, *(i + 1 for i in tokenizer.eos_ids))
        if needed > cfg.vocab_size:  # fewer ids than rows are normal, more would index past the embedding
            raise ValueError(
                f"{tokenizer_file} needs {needed} ids, more than the {cfg.vocab_size} rows of the model's embedding"
            )
    with _open(Path(path)) as files:
        _check_tensors(cfg, files, Path(path), {SCORE: (1, cfg.d_model)} if scorer else {})
    return cfg


def load(path: str | Path, mesh: jax.sharding.Mesh | None = None, dtype=jnp.float32) -> tuple[ModelConfig, dict]:
    """(config, stacked params in `dtype` on their shards); without a mesh on the default device."""
    cfg = check(path)
    return cfg, _load(Path(path), cfg, mesh, dtype)


def load_scorer(path: str | Path, mesh: jax.sharding.Mesh, dtype=jnp.float32) -> tuple[ModelConfig, dict, np.ndarray]:
    """(config, stacked params in `dtype` on their shards, head f32[D] on the host) of a reward model."""
    cfg = check(path, scorer=True)
    with _open(Path(path)) as files:
        head = read_slice(files, Tensor(SCORE, False), "", ((0, 1), (0, cfg.d_model)))[0].astype(np.float32)
    return cfg, _load(Path(path), cfg, mesh, dtype), head


def _load(path: Path, cfg: ModelConfig, mesh: jax.sharding.Mesh | None, dtype) -> dict:
    abstract = decoder.abstract_params(cfg, dtype)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, abstract)
    else:
        shardings = sharding.param_specs(cfg, mesh)
    with _open(path) as files:
        params = {
            name: _place(leaf, shardings[name], functools.partial(read_slice, files, END_TENSORS[name], ""))
            for name, leaf in abstract.items()
            if name in END_TENSORS
        }
        tensors = _tensors_of(cfg, files)
        for key, stack in decoder.stacks(cfg).items():
            params[key] = {
                name: _place(
                    leaf,
                    shardings[key][name],
                    functools.partial(_read_stacked, cfg, files, tensors[name], stack.layers, leaf.dtype),
                )
                for name, leaf in abstract[key].items()
            }
    return params


def check_finite(path: str | Path, params: dict) -> None:
    """ValueError: weights that were read from this folder are not finite; every sample would be garbage."""
    finite = jax.device_get(jax.jit(functools.partial(jax.tree.map, lambda x: jnp.isfinite(x).all()))(params))
    leaves = jax.tree_util.tree_leaves_with_path(finite)
    if bad := [jax.tree_util.keystr(key, simple=True, separator=".") for key, whole in leaves if not whole]:
        raise ValueError(f"{path} holds weights that are not finite, in {', '.join(bad[:MOST_NAMED])}")


def save(
    path: str | Path,
    cfg: ModelConfig,
    params: dict,
    source_path: str | Path | None = None,
    *,
    dtype=None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    padded: bool = False,
) -> None:
    """Write stacked params as a folder; tokenizer files, end ids and unknown config fields come from `source_path`.

    `dtype` is the type on disk (default: that of the params). padded: experts that return their input have matrices of
    zeros, which transformers asks for and no hub folder holds. ValueError if `path` already holds something, or if the
    params are not those of `cfg`.
    """
    path = Path(path)
    check_vacant(path)
    # The tree that `cfg` describes, or a sentence: a checkpoint of another model would write a broken folder
    found, expected = (
        {
            jax.tree_util.keystr(key, simple=True, separator="."): leaf.shape
            for key, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (params, decoder.abstract_params(cfg))
    )
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"the params have {name} of shape {found.get(name)}, but the model's config implies "
                f"{expected.get(name)}"
            )
    dtype = np.dtype(dtype or params["embed"].dtype)
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # what a killed save left
    part.mkdir(parents=True)
    source = Path(source_path) if source_path else part  # which has no such files
    config, generation = (
        read_json(source / name) if (source / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    )
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(_open(source)) if config.get("model_type") in TEXT else {}
        names = {name: stored for name, (_, _, stored) in there.items()}
        of_text = (at.partition("layers.")[0] for name, at in names.items() if name.startswith("model.layers."))
        first = next(of_text, "model.")
        text = (
            (names.get(name, name.replace("model.", first, 1)), value)
            for name, value in _disk_tensors(cfg, params, dtype, padded)
        )
        beside = ((name, there[name][0].get_tensor(name)) for name in there if name.startswith(BESIDE))
        _save_tensors(part, itertools.chain(text, beside), max_shard_bytes)
    if (source / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(source)
        eos = list(tokenizer.eos_ids) if len(tokenizer.eos_ids) > 1 else tokenizer.eos_ids[0]
        # the union goes into both files: each serves readers that know only that one
        ids = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_id}
        config, generation = {**config, **ids}, {**generation, **ids}
    _write_json(part / "config.json", config_json(cfg, dtype.name, config))
    if generation:
        _write_json(part / "generation_config.json", generation)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    part.replace(path)


def check_vacant(path: str | Path) -> None:
    """ValueError if `save` would refuse this path: ask before the work that leads up to it."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; a model is never written over another")


def _tensors_of(cfg: ModelConfig, there: Iterable[str] = ()) -> dict[str, Tensor]:
    """Where each parameter of a layer lies in a folder of these tensors."""
    known, names = family(cfg.family).tensors, {re.sub(r"^model\.layers\.\d+\.", "", name) for name in there}
    return {name: x.other if x.other and x.other.name in names else x for name, x in known.items()}


def _layer_parameters(
    cfg: ModelConfig, tree: dict, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, list[Tensor], decoder.Stack, list]]:
    """(its name, where it lies on disk, its stack, the leaf) of every parameter of the layers of a tree like the
    params; of several that share a tensor, all of these at once, under the first one's name."""
    for key, stack in decoder.stacks(cfg).items():
        sharing: dict[str, list[str]] = {}
        for name in sorted(tree[key], key=lambda name: tensors[name].half or 0):
            sharing.setdefault(tensors[name].name, []).append(name)
        for names in sharing.values():
            yield names[0], [tensors[name] for name in names], stack, [tree[key][name] for name in names]


# -- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Tensors]:
    """Every tensor of all shards; headers only, the payload stays on disk."""
    with contextlib.ExitStack() as stack:
        tensors = {}
        files = [path / SINGLE]
        if not files[0].is_file():
            if not (path / INDEX).is_file():
                raise ValueError(f"{path} holds neither {SINGLE} nor {INDEX}")
            weight_map = read_json(path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{path / INDEX} has no weight_map")
            there = set(os.listdir(path))
            for tensor, name in weight_map.items():
                if not isinstance(name, str) or Path(name).name != name:
                    raise ValueError(
                        f"{path / INDEX} says that {name!r:.80} holds {tensor}; a shard is a file beside it, and "
                        f"nothing outside its folder is read"
                    )
                if name not in there or not (path / name).is_file():
                    raise ValueError(f"{path / name[:200]} is missing; {INDEX} says that it holds {tensor}")
            files = sorted({path / name for name in weight_map.values()})
        for file in files:
            try:
                handle = stack.enter_context(safetensors.safe_open(file, "numpy"))
            except safetensors.SafetensorError as error:
                raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
            for name in handle.keys():  # a handle is no iterable
                text = TEXT_PREFIX.match(name)
                ours = f"{'model.' if text[1] else ''}{name[text.end() :]}" if text else name
                tensors[ours] = handle, file, name
        yield packed.unpacked(tensors)


def _check_tensors(cfg: ModelConfig, tensors: Tensors, path: Path, head: dict[str, tuple[int, ...]]) -> None:
    abstract = decoder.abstract_params(cfg)
    places = [(tensor.name, tensor, abstract[name].shape) for name, tensor in END_TENSORS.items() if name in abstract]
    for _, (tensor, *_), stack, (leaf, *others) in _layer_parameters(cfg, abstract, _tensors_of(cfg, tensors)):
        names = [tensor.name.format(e=e) for e in range(leaf.shape[1])] if tensor.per_expert else [tensor.name]
        for layer in stack.layers:
            shape = leaf.shape[2 if tensor.per_expert else 1 :]
            shape = (*shape[:-1], shape[-1] + sum(other.shape[-1] for other in others))
            places += [(f"model.layers.{layer}.{name}", tensor, shape) for name in names]
    expected = {
        name: (*shape[:-2], shape[-1], *[1] * tensor.channels, shape[-2]) if tensor.transposed else shape
        for name, tensor, shape in places
    } | head
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"{path} lacks the tensor {name}, which {cfg.family} of its config.json needs")
        handle, file, stored = tensors[name]
        found = handle.get_slice(stored)
        if tuple(found.get_shape()) != shape:
            raise ValueError(f"{file} holds {name} of shape {tuple(found.get_shape())}; config.json implies {shape}")
        if found.get_dtype() not in DISK_DTYPES:
            raise ValueError(f"{file} holds {name} as {found.get_dtype()}; known: {', '.join(DISK_DTYPES)}")
    known, ignored, beside = family(cfg.family), [], []
    more = read_json(path / "config.json").get("model_type") in TEXT
    for name, (_, file, _) in tensors.items():
        if more and name.startswith(BESIDE):
            beside.append(name)
            continue
        # What some writers add and that says nothing new: rotary tables, a head that repeats the tied embedding, the
        # matrices of experts that return their input, keys and values of layers that read other layers'
        repeated = cfg.tie_embeddings and name == END_TENSORS["lm_head"].name
        if name in expected or repeated or name.endswith("rotary_emb.inv_freq"):
            continue
        found = re.fullmatch(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate|up)_proj\.weight", name)
        if found and cfg.experts and cfg.experts.count <= int(found[1]) < cfg.experts.choices:
            continue
        found = re.match(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
        if found and cfg.kv_owners <= int(found[1]) < cfg.n_layers:
            continue
        # Of multi-token prediction, which the decoder does not compute: an own module, or a layer behind the last
        found = re.match(r"model\.layers\.(\d+)\.", name)
        behind = found is not None and int(found[1]) >= cfg.n_layers
        if not (name.startswith(known.ahead) or (known.ahead_layers and behind)):
            raise ValueError(f"{file} holds {name}, which the {cfg.family} of config.json does not have")
        ignored.append(name)
    if ignored:
        print(f"{path}: {len(ignored)} tensors of multi-token prediction are ignored ({ignored[0]}, ...)", flush=True)
    if beside:
        print(
            f"{path}: the text model alone is computed; {len(beside)} tensors beside it ({beside[0]}, ...) go into an "
            f"export as they are",
            flush=True,
        )


def _place(leaf: jax.ShapeDtypeStruct, target: jax.sharding.Sharding, read: Callable[..., np.ndarray]) -> jax.Array:
    """One parameter onto its shards; replicas of a slice share one `read(bounds)`."""
    parts: dict[Bounds, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        if bounds not in parts:
            parts[bounds] = read(bounds).astype(leaf.dtype, order="C", copy=False)
        return parts[bounds]

    return jax.make_array_from_callback(leaf.shape, target, part)


def read_slice(
    tensors: Tensors, tensor: Tensor, prefix: str, bounds: Bounds, cfg: ModelConfig | None = None
) -> np.ndarray:
    """These bounds (in memory order) of one tensor; only their bytes are read, of rows those between the first and the
    last. cfg: of the model, where the tensor has rows."""
    name = prefix + tensor.name
    handle, _, stored = tensors[name]
    whole = handle.get_slice(stored)
    if tensor.alternating:  # both halves are read, for a slice has no step
        bounds = (*bounds[:-1], (2 * bounds[-1][0], 2 * bounds[-1][1]))
        return whole[tuple(slice(*bound) for bound in bounds)][..., tensor.half :: 2]
    rows = None
    if tensor.transposed:
        *leading, inner, (start, stop) = bounds
        first = tensor.half * whole.get_shape()[-2] // 2 if tensor.half else 0
        bounds = (*leading, (first + start, first + stop), *[(0, 1)] * tensor.channels, inner)
        if tensor.rows and cfg:
            rows = np.array(tensor.rows(cfg)[start:stop])
            bounds = (*leading, (int(rows.min()), int(rows.max()) + 1), *bounds[len(leading) + 1 :])
    value = whole[tuple(slice(*bound) for bound in bounds)]
    value = value[:, 0] if tensor.channels else value
    value = value if rows is None else value[rows - rows.min()]
    return value.swapaxes(-1, -2) if tensor.transposed else value


def _read_stacked(
    cfg: ModelConfig, tensors: Tensors, tensor: Tensor, layers: tuple[int, ...], dtype: np.dtype, bounds: Bounds
) -> np.ndarray:
    """These bounds of a parameter [layers, ...], or [layers, experts, ...], of the layers of these numbers."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for row, layer in enumerate(range(*bounds[0])):
        prefix = f"model.layers.{layers[layer]}."
        if not tensor.per_expert:
            out[row] = read_slice(tensors, tensor, prefix, bounds[1:], cfg)
            continue
        for at, e in enumerate(range(*bounds[1])):
            of_one = Tensor(tensor.name.format(e=e), tensor.transposed)
            out[row, at] = read_slice(tensors, of_one, prefix, bounds[2:])
    return out


# -- writing ---------------------------------------------------------------------------------------------------------


def _disk_tensors(cfg: ModelConfig, params: dict, dtype: np.dtype, padded: bool) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value as stored), one parameter on the host at a time, or the two that share a tensor."""

    def stored(name: str, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        # selections by biases in a narrow type have ties; hub folders hold them in f32 too
        value = value.swapaxes(-1, -2) if tensor.transposed else value
        value = value[:, None] if tensor.channels else value
        return np.ascontiguousarray(value, np.float32 if name in WIDE else dtype)

    for name, tensor in END_TENSORS.items():
        if name in params:
            yield tensor.name, stored(name, tensor, np.asarray(params[name]))
    for name, (tensor, *others), stack, leaves in _layer_parameters(cfg, params, _tensors_of(cfg)):
        for layer, *pieces in zip(stack.layers, *map(np.asarray, leaves), strict=True):
            value = np.concatenate(pieces, axis=-1) if pieces[1:] else pieces[0]
            if tensor.alternating:
                value = np.stack(pieces, axis=-1).reshape(value.shape)
            if tensor.rows:
                ours = np.concatenate([x.rows(cfg) for x in (tensor, *others) if x.rows])
                value = value[..., np.argsort(ours)]
            each = list(enumerate(value)) if tensor.per_expert else [(0, value)]
            if padded and cfg.experts and name in ("experts_gate", "experts_up"):
                each += [(e, np.zeros_like(value[0])) for e in range(cfg.experts.count, cfg.experts.choices)]
            for e, one in each:
                yield f"model.layers.{layer}.{tensor.name.format(e=e)}", stored(name, tensor, one)


def _save_tensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    files: list[tuple[str, list[str]]] = []  # (temporary name, tensors)
    shard: dict[str, np.ndarray] = {}
    total_bytes = 0

    def flush() -> None:
        file = folder / f"part-{len(files)}"
        files.append((file.name, list(shard)))
        save_file(shard, file, metadata={"format": "pt"})  # transformers insists on the metadata
        # safetensors lets the owner alone read; the folder has what umask allows
        file.chmod(folder.stat().st_mode & 0o666)
        shard.clear()

    for name, value in tensors:
        if shard and sum(x.nbytes for x in shard.values()) + value.nbytes > max_shard_bytes:
            flush()
        shard[name] = value
        total_bytes += value.nbytes
    flush()
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / SINGLE)
        return
    weight_map = {}
    for i, (temporary, names) in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / temporary).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
