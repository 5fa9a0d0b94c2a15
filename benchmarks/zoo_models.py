"""Tiny, random-weight models of public libraries for `zoo.py`, each with a few examples that it takes."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedspa.errors import one_line
from fedspa.examples import Tree

PACKAGES = ("transformers", "timm", "torch_geometric", "diffusers", "pytorch-tabnet", "rtdl_revisiting_models", "ncps")
COUNT, WORDS, LENGTH, CLASSES, SIDE = 6, 48, 8, 3, 32


@dataclass(frozen=True)
class Model:
    """What `zoo.py` trains: a module, examples that it takes, and the task by name or as a loss."""

    module: nn.Module
    x: Tree
    y: Tree
    task: Any


def loss(module: nn.Module, example: Tree) -> Tensor:
    """A loss of every number that a module returns, for types without a task by name."""
    assert isinstance(example, tuple)
    x = example[0]
    found = module(x) if isinstance(x, Tensor) else module(**x) if isinstance(x, dict) else module(*x)
    values = [each for each in _tensors(found) if each.is_floating_point()]
    return torch.stack([each.sin().mean() + (each * each).mean() / 8 for each in values]).sum()


def _tensors(found: object) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        found = tuple(found.values())
    return [each for part in found for each in _tensors(part)] if isinstance(found, tuple | list) else []


# Sizes by the names that configs of transformers have for them: 4 heads of 8 in a width of 32.
_SIZES: list[tuple[int, str]] = [
    (
        32,
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim embedding_dim rnn_hidden_size "
        "attention_hidden_size output_hidden_size decoder_hidden_size pooler_hidden_size pooler_output_size "
        "projection_dim "
        "n_ctx_embed width backbone_hidden_size classifier_proj_size codevector_dim proj_codevector_dim lru_width "
        "mamba_d_ssm true_hidden_size encoder_hidden_size fpn_hidden_size neck_hidden_size hidden_dim bottleneck_size "
        "attention_dim output_dim embed_size channels text_embed_dim mm_hidden_size q_lora_rank kv_lora_rank "
        "o_lora_rank "
        "q_hidden_size reassemble_hidden_size d_embed",
    ),
    (
        48,
        "intermediate_size ffn_dim n_inner d_ff dff dim_ff d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size hidden_dim_ff intermediate_dim "
        "mlp_dim ffn_intermediate_size prefix_intermediate_size encoder_intermediate_size intermediate_size_mlp",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok moe_top_k "
        "num_experts_per_token depth encoder_num_hidden_layers decoder_num_hidden_layers num_codevector_groups "
        "num_global_layers num_dense_layers mamba_n_groups n_groups moe_topk",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "n_routed_experts num_local_experts moe_num_experts index_n_heads linear_num_heads linear_num_key_heads "
        "linear_num_value_heads encoder_num_attention_heads decoder_num_attention_heads time_step_rank mamba_dt_rank "
        "num_conv_pos_embedding_groups index_topk qk_rope_head_dim attention_window local_attention "
        "moe_layer_end_index",
    ),
    (
        8,
        "head_dim d_kv v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim index_head_dim "
        "kv_channels "
        "attention_head_dim dim_head d_head linear_head_dim mamba_d_state state_size mamba_d_head mamba_head_dim "
        "patch_size num_conv_pos_embeddings num_mel_bins chunk_size mamba_chunk_size rotary_dim "
        "num_codevectors_per_group "
        "sliding_window hidden_size_per_layer_input laurel_rank mamba_n_heads mamba_num_heads ssm_state_size key_dim "
        "coordinate_size shape_size tdnn_dim_each",
    ),
    (
        64,
        "max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions n_ctx block_size "
        "max_2d_position_embeddings seq_length max_sequence_length original_max_position_embeddings max_length",
    ),
    (SIDE, "image_size"),
    (WORDS, "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab num_hash_buckets entity_vocab_size"),
]
# Values of several numbers, and of types that need their own.
_VALUES: dict[str, Any] = {
    **{name: size for size, names in _SIZES for name in names.split()},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": CLASSES,
    "qk_head_dim": 12,
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2,
    "tdnn_dim": [8, 8, 8, 8, 8],
    "entity_emb_size": 16,
    "xvector_output_dim": 16,
    "mask_token_id": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "time_embed_dim": 8,
    "sep_token_id": 2,
    "decoder_start_token_id": 1,
    "cls_token_id": 1,
    "num_kv_shared_layers": 0,
    "use_auxiliary_head": False,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "convnext": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    "mobilenet_v1": {"depth_multiplier": 0.1, "min_depth": 4},
    "mobilenet_v2": {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4},
    "segformer": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    "pvt": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    "pvt_v2": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    "cvt": {"embed_dim": [8, 8, 8], "num_heads": [1, 2, 2], "depth": [1, 1, 1]},
    "poolformer": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 7},
    "focalnet": {"embed_dim": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "patch_size": 4, "focal_levels": [1, 1]},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 16},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16, "patch_size": 8},
    "bloom": {"hidden_size": 32}, "xlnet": {"d_head": 8}, "ctrl": {"n_embd": 32, "dff": 48},
    "patchtst": {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4},
    "patchtsmixer": {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4},
}  # fmt: skip
_TEXT, _PIXELS, _SOUND, _SERIES = "input_ids", "pixel_values", "input_values", "past_values"
# Heads of transformers and the task of each; `loss` where no task by name fits.
HEADS: dict[str, Any] = {
    "SEQUENCE_CLASSIFICATION": "classification",
    "IMAGE_CLASSIFICATION": "classification",
    "AUDIO_CLASSIFICATION": "classification",
    "VIDEO_CLASSIFICATION": "classification",
    "CAUSAL_LM": "next-token",
    "MASKED_LM": "token-classification",
    "TOKEN_CLASSIFICATION": "token-classification",
    "TIME_SERIES_CLASSIFICATION": loss,
    "TIME_SERIES_REGRESSION": loss,
    "TIME_SERIES_PREDICTION": loss,
    "SEMANTIC_SEGMENTATION": loss,
    "DEPTH_ESTIMATION": loss,
    "MASKED_IMAGE_MODELING": loss,
    "AUDIO_FRAME_CLASSIFICATION": loss,
    "AUDIO_XVECTOR": loss,
    "CTC": loss,
    "NEXT_SENTENCE_PREDICTION": "classification",
    "SEQ_TO_SEQ_CAUSAL_LM": loss,
    "QUESTION_ANSWERING": loss,
    "MULTIPLE_CHOICE": loss,
}


def _shrunk(config_class: Any, model_type: str = "") -> dict[str, Any]:
    """Arguments of a config class that make it tiny, with those of its parts."""
    known = config_class().to_dict()
    options = {name: value for name, value in _VALUES.items() if name in known and _alike(known[name], value)}
    # Read as attributes even where `to_dict` leaves them out.
    options |= {"num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(known.get(name), dict) and hasattr(part, "model_type"):
            options[name] = _shrunk(part)
    return options | _EXCEPTIONS.get(model_type, {})


def _alike(old: object, new: object) -> bool:
    """Lists stay lists, and what is switched off by None or 0 stays so."""
    if isinstance(new, list) or isinstance(old, list | tuple):
        return isinstance(old, list | tuple) == isinstance(new, list)
    return old is not None and old is not False and (old != 0 or new in (0, 1, 2))


def _transformer(head: str, model_type: str) -> Model:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    config_class = configs[model_type]
    binary = {"num_labels": 2} if head == "QUESTION_ANSWERING" else {}  # the logits of start and end
    config = config_class(**_shrunk(config_class, model_type) | binary)
    kind = getattr(auto, f"MODEL_FOR_{head}_MAPPING")[config_class]
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    module = kind(config).float().train()
    x = _inputs(module, head)
    task, y = HEADS[head], torch.arange(COUNT) % (2 if head == "NEXT_SENTENCE_PREDICTION" else CLASSES)
    if task in ("next-token", "token-classification"):
        y = torch.randint(4, CLASSES + 4, (COUNT, LENGTH)) - (4 if head == "TOKEN_CLASSIFICATION" else 0)
    return Model(module, x, y, task)


def _inputs(module: Any, head: str) -> Tree:
    config, takes = module.config, inspect.signature(module.forward).parameters
    if _SERIES in takes:
        return {_SERIES: torch.randn(COUNT, config.context_length, config.num_input_channels)}
    if _TEXT in takes and "IMAGE" not in head and "AUDIO" not in head:
        shape = (COUNT, 2, LENGTH) if head == "MULTIPLE_CHOICE" else (COUNT, LENGTH)
        words = torch.randint(4, WORDS, shape)
        words[..., -1] = 2  # the end, which some classifiers look for
        x: dict[str, Tree] = {_TEXT: words}
        if "attention_mask" in takes:
            x["attention_mask"] = torch.ones_like(words)
        if "SEQ_TO_SEQ" in head:
            x["decoder_input_ids"] = words.clone()
        return x
    if _PIXELS in takes:
        side, channels = getattr(config, "image_size", SIDE), getattr(config, "num_channels", 3)
        side = side if isinstance(side, int) else side[0]
        frames = (getattr(config, "num_frames", 8),) if head == "VIDEO_CLASSIFICATION" else ()
        return {_PIXELS: torch.randn(COUNT, *frames, channels, side, side)}
    if _SOUND in takes:
        spectrogram = getattr(config, "max_length", 0), getattr(config, "num_mel_bins", 0)
        return {_SOUND: torch.randn(COUNT, *(spectrogram if all(spectrogram) else (800,)))}
    if "input_features" in takes:
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 16)
        length = 2 * getattr(config, "max_source_positions", 16)
        first_mels = type(config).__name__.startswith("Whisper")
        return {"input_features": torch.randn(COUNT, *((mels, length) if first_mels else (length, mels)))}
    raise ValueError(f"its inputs are {', '.join(takes)}")


# Other sources: name → what builds the module, and its examples.
Build = Callable[[], tuple[nn.Module, Tree]]


def _images(*shape: int) -> Tensor:
    return torch.randn(COUNT, *(shape or (3, SIDE, SIDE)))


def _graph(kind: str, *sizes: int) -> Build:
    """A graph of five nodes in a ring, with features of each example's own: a class for the graph."""

    class OfGraph(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.LazyLinear(CLASSES)
            around = torch.arange(5)
            self.register_buffer("edges", torch.stack([around, around.roll(1)]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            nodes = torch.stack([self.layer(one, self.edges) for one in x])
            return self.head(nodes.mean(dim=1))  # type: ignore[no-any-return]

    def make() -> tuple[nn.Module, Tree]:
        module, x = OfGraph(_named("torch_geometric.nn", kind)(*sizes)), torch.randn(COUNT, 5, 6)
        module(x)  # the head takes its size
        return module, x

    return make


_CONVS = (
    "GCNConv SAGEConv GraphConv ResGatedGraphConv GATConv GATv2Conv TransformerConv TAGConv SGConv SSGConv MFConv "
    "FeaStConv LEConv ClusterGCNConv GENConv FiLMConv SuperGATConv EGConv GeneralConv ARMAConv MixHopConv"
)
_GRAPH_NETS = "GCN GraphSAGE GIN GAT EdgeCNN"
_TIMM = (
    "test_vit test_vit2 test_vit3 test_vit4 test_resnet test_efficientnet test_efficientnet_ln test_efficientnet_evos "
    "test_efficientnet_gn test_convnext test_convnext2 test_convnext3 test_byobnet test_mambaout test_nfnet "
    "test_coatnet test_maxvit test_vit_relpos "
    "mobilenetv2_035 mobilenetv3_small_050 regnetx_002 regnety_002 tinynet_e lcnet_035 ghostnet_050 mnasnet_small "
    "dla46_c mobilevit_xxs edgenext_xx_small xcit_nano_12_p16_224 repghostnet_050"
)


def _others() -> dict[str, Build]:
    found: dict[str, Build] = {}
    if find_spec("timm"):
        found |= {f"timm/image/{name}": _timm(name) for name in _TIMM.split()}
    if find_spec("torch_geometric"):
        found |= {f"torch_geometric/layer/{name}": _graph(name, 6, 8) for name in _CONVS.split()}
        found |= {f"torch_geometric/net/{name}": _graph(name, 6, 8, 2) for name in _GRAPH_NETS.split()}
    if find_spec("diffusers"):
        for name, (options, x) in _DIFFUSERS.items():
            found[f"diffusers/denoiser/{name}"] = _by_options("diffusers", name, options, x)
    for name, (module, kind, options, x) in _TABLES.items():
        if find_spec(module.partition(".")[0]):
            found[name] = _by_options(module, kind, options, x)
    return found


def _named(module: str, kind: str) -> Any:
    return getattr(importlib.import_module(module), kind)


def _by_options(module: str, kind: str, options: dict[str, Any], x: Callable[[], Tree]) -> Build:
    return lambda: (_named(module, kind)(**options), x())


def _timm(name: str) -> Build:
    def make() -> tuple[nn.Module, Tree]:
        timm = importlib.import_module("timm")
        side = {"img_size": 64} if any(word in name for word in ("vit", "patch16", "patch4", "mixer")) else {}
        try:
            return timm.create_model(name, num_classes=CLASSES, **side), _images(3, 64, 64)
        except TypeError:
            return timm.create_model(name, num_classes=CLASSES), _images(3, 64, 64)

    return make


_BLOCKS = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
_STEP: Callable[[], Tensor] = lambda: torch.arange(COUNT)  # noqa: E731
_DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], Tree]]] = {
    "UNet2DModel": (
        {
            "in_channels": 1, "out_channels": 1, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4, **_BLOCKS,
        },
        lambda: {"sample": _images(1, 8, 8), "timestep": _STEP()},
    ),
    "UNet2DConditionModel": (
        {
            "in_channels": 1, "out_channels": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 8, "attention_head_dim": 2,
            **_BLOCKS,
        },
        lambda: {"sample": _images(1, 8, 8), "timestep": _STEP(), "encoder_hidden_states": _images(4, 8)},
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 2, "num_layers": 1, "sample_size": 8,
         "patch_size": 4, "norm_num_groups": 1, "num_embeds_ada_norm": 10, "out_channels": 2},
        lambda: {"hidden_states": _images(2, 8, 8), "timestep": _STEP(), "class_labels": _STEP()},
    ),
    "AutoencoderKL": (
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_BLOCKS},
        lambda: _images(3, 8, 8),
    ),
    "VQModel": (
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_BLOCKS},
        lambda: _images(3, 8, 8),
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1)},
        lambda: _images(3, 8, 8),
    ),
}  # fmt: skip
_ROW: Callable[[], Tensor] = lambda: torch.randn(COUNT, 5)  # noqa: E731
_FT = {"n_cont_features": 5, "cat_cardinalities": [], "d_out": 3, "n_blocks": 1, "d_block": 8,
       "attention_n_heads": 2, "attention_dropout": 0.1, "ffn_d_hidden": 8, "ffn_dropout": 0.1,
       "residual_dropout": 0.0, "ffn_d_hidden_multiplier": None}  # fmt: skip
_TABNET = {"input_dim": 5, "output_dim": 3, "n_d": 4, "n_a": 4, "group_attention_matrix": torch.eye(5)}
_RESNET = {"d_in": 5, "d_out": 3, "n_blocks": 1, "d_block": 8, "d_hidden": 8, "d_hidden_multiplier": None,
           "dropout1": 0.1, "dropout2": 0.0}  # fmt: skip
_MLP = {"d_in": 5, "d_out": 3, "n_blocks": 1, "d_block": 8, "dropout": 0.1}
_TABLES: dict[str, tuple[str, str, dict[str, Any], Callable[[], Tree]]] = {
    "pytorch_tabnet/table/TabNet": ("pytorch_tabnet.tab_network", "TabNet", _TABNET, _ROW),
    "rtdl/table/MLP": ("rtdl_revisiting_models", "MLP", _MLP, _ROW),
    "rtdl/table/ResNet": ("rtdl_revisiting_models", "ResNet", _RESNET, _ROW),
    "rtdl/table/FTTransformer": (
        "rtdl_revisiting_models",
        "FTTransformer",
        _FT,
        lambda: {"x_cont": _ROW(), "x_cat": torch.zeros(COUNT, 0, dtype=torch.long)},
    ),
    **{
        f"rtdl/table/{kind}": ("rtdl_num_embeddings", kind, {"n_features": 5, "d_embedding": 4} | more, _ROW)
        for kind, more in {
            "LinearEmbeddings": {},
            "LinearReLUEmbeddings": {},
            "PeriodicEmbeddings": {"lite": False},
        }.items()
    },
    **{
        f"ncps/series/{kind}": ("ncps.torch", kind, {"input_size": 4, "units": 8}, lambda: torch.randn(COUNT, 6, 4))
        for kind in ("CfC", "LTC")
    },
}


def names() -> tuple[list[str], dict[str, str]]:
    """All types, those of architectures that came before last; and the packages that cannot be imported, with why."""
    _stand_in_for_operators()
    missing = {}
    for package in ("timm", "torch_geometric", "diffusers", "pytorch_tabnet", "rtdl_revisiting_models", "ncps"):
        try:
            importlib.import_module(package)
        except Exception as error:
            missing[package] = f"{type(error).__name__}: {one_line(error)}"
    found, seen, ranked = [name for name in _others() if name.partition("/")[0] not in missing], Counter[str](), []
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for head in HEADS:
        classes = set()
        for model_type, kind in getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            if kind not in classes:
                ranked.append((seen[model_type], f"transformers/{head}/{model_type}"))
                seen[model_type] += 1
            classes.add(kind)
    slow = [name for name in found if name.startswith("timm/") and "test_" not in name]
    transformers = [name for _, name in sorted(ranked, key=lambda each: each[0])]
    return [name for name in found if name not in slow] + transformers + slow, missing


def build(name: str) -> Model:
    _stand_in_for_operators()
    source, head, kind = name.split("/")
    if source == "transformers":
        return _transformer(head, kind)
    module, x = _others()[name]()
    classes = source in ("timm", "torch_geometric") or name in ("rtdl/table/MLP", "rtdl/table/ResNet")
    return Model(module.train(), x, torch.arange(COUNT) % CLASSES, "classification" if classes else loss)


def _stand_in_for_operators() -> None:
    """torchvision's wheels for CUDA have no operators where torch has none, and cannot be imported; timm needs no
    operator, only the import."""
    if find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]


_LIBRARIES: list[torch.library.Library] = []
