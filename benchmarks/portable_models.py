"""Train models of torchvision, timm and transformers with portable bits under several settings.

    python benchmarks/portable_models.py [--models NAME ...] [--packages FOLDER] [-o FILE]

The models are small and have random weights. Each is built and trained for two steps; the digest of
its weights, buffers and losses must be the same under each setting. FOLDER is where torchvision
and timm are installed, if they are not installed beside torch.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from measurement import PORTABLE_SETTINGS, run_settings
from torch import Tensor, nn

from lightning_d9m import portable

TORCHVISION: dict[str, dict[str, Any]] = {
    "mobilenet_v2": {"width_mult": 0.35},
    "mobilenet_v3_small": {"width_mult": 0.5},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "MNASNet": {"alpha": 0.25},
    "DenseNet": {"growth_rate": 8, "block_config": (2, 2, 2), "num_init_features": 16},
    "VisionTransformer": {
        "image_size": 64,
        "patch_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "SwinTransformer": {
        "patch_size": [4, 4],
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": [4, 4],
    },
}
TIMM = (
    *("lcnet_035", "tinynet_e", "mobilevit_xxs", "edgenext_xx_small", "test_vit", "test_convnext"),
    *("test_efficientnet", "test_resnet", "test_byobnet", "test_mambaout", "test_nfnet"),
)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 99,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "ElectraForMaskedLM": {"embedding_size": 32},
    "AlbertForMaskedLM": {"embedding_size": 16},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "LlamaForCausalLM": {"num_key_value_heads": 1},
    "MistralForCausalLM": {"num_key_value_heads": 1},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "GemmaForCausalLM": {"num_key_value_heads": 1, "head_dim": 16},
    "MixtralForCausalLM": {"num_key_value_heads": 1, "num_local_experts": 3},
    "MambaForCausalLM": {"state_size": 4},
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "forced_eos_token_id": None,
        "decoder_start_token_id": 2,
        "bos_token_id": 1,
    },
}


def make_image_model(build: Callable[..., nn.Module], **options: Any) -> Callable[[], Tensor]:
    """Return a model's loss as a function, with the model as its attribute."""
    model = build(num_classes=10, **options)
    images, classes = torch.randn(2, 3, 64, 64), torch.tensor([3, 7])

    def find_loss() -> Tensor:
        return nn.functional.cross_entropy(model(images), classes)

    find_loss.model = model  # type: ignore[attr-defined]
    return find_loss


def make_language_model(name: str, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a language model's loss as a function, with the model as its attribute."""
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SMALL | options)).train()
    tokens = torch.randint(3, 99, (2, 12))

    def find_loss() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    find_loss.model = model  # type: ignore[attr-defined]
    return find_loss


def list_models() -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Return what builds each model."""
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {}
    for name, options in TORCHVISION.items():

        def build_vision(name: str = name, options: Any = options) -> Callable[[], Tensor]:
            import torchvision.models as vision

            return make_image_model(getattr(vision, name), **options)

        found[f"torchvision {name}"] = build_vision
    for name in TIMM:

        def build_timm(name: str = name) -> Callable[[], Tensor]:
            import timm

            given = {"img_size": 64} if "vit" in name and "mobile" not in name else {}
            return make_image_model(lambda **more: timm.create_model(name, **given, **more))

        found[f"timm {name}"] = build_timm
    for name, options in TRANSFORMERS.items():
        found[f"transformers {name}"] = lambda name=name, options=options: make_language_model(
            name, options
        )
    return found


def train(build: Callable[[], Callable[[], Tensor]]) -> str:
    """Build a model and train it for two steps; return a digest."""
    with portable():
        torch.manual_seed(1)
        find_loss = build()
        model: nn.Module = find_loss.model  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = find_loss()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = sha256()
        for one in (*model.state_dict().values(), *losses):
            total.update(one.detach().contiguous().numpy().tobytes())
        return total.hexdigest()[:16]


def train_all(names: list[str]) -> dict[str, str]:
    """Return the digest, or an error, of each model."""
    found = {}
    for name, build in list_models().items():
        if names and name not in names:
            continue
        try:
            found[name] = train(build)
        except Exception as error:  # noqa: BLE001 - each model counts
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Train the models under each setting, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--packages", default="")
    parser.add_argument("--here", action="store_true", help="only in this process, as JSON")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.here:
        if options.packages:
            sys.path.append(options.packages)
            # A wheel of torchvision for CUDA lacks its own operations where CUDA's libraries are
            # missing; these models need none, but torchvision wants to find these.
            stub = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                stub.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        warnings.simplefilter("ignore")
        print(json.dumps(train_all(options.models)))
        return
    words = ("--packages", options.packages, "--models", *options.models)
    found = run_settings(PORTABLE_SETTINGS, __file__, *words)
    verdicts = {}
    for name, first in found[0].items():
        equal = all(one[name] == first for one in found)
        verdicts[name] = first if ":" in first else ("equal" if equal else "differs")
    counts = {kind: list(verdicts.values()).count(kind) for kind in ("equal", "differs")}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "settings": PORTABLE_SETTINGS,
        "models": len(verdicts),
        **counts,
        "verdicts": verdicts,
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
