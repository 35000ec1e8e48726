"""A Llama model of two layers that vLLM can serve: configuration, byte-level tokenizer and weights."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Configuration for schedulers without a model or a tokenizer. It allows longer prompts.
TINY_LLAMA = {**CONFIG, "vocab_size": 1000, "max_position_embeddings": 131072}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": CONFIG["max_position_embeddings"],
}


def write_model(folder):
    """Write the configuration, and a tokenizer with one token for each byte. Ids 259 to 511 have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return folder


def write_weights(folder, noise=0.0):
    """Write random weights with which every prompt token affects the output.

    With vLLM's dummy weights, the output depends on little more than the last token. With a small `noise` the weights
    are those of a draft model, which agrees with the model without noise most of the time.
    """
    import torch
    from safetensors.torch import save_file

    generator, noise_generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def random_matrix(rows, columns, gain=1.0):
        values = torch.randn(rows, columns, generator=generator)
        values += noise * torch.randn(rows, columns, generator=noise_generator)
        return values * (gain / columns**0.5)

    width, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv_width = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    weights = {
        "model.embed_tokens.weight": random_matrix(vocab, width, width**0.5),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": random_matrix(vocab, width, 3.0),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(width),
            f"{at}.post_attention_layernorm.weight": torch.ones(width),
            # Large queries make attention select single positions instead of averaging over all of them.
            f"{at}.self_attn.q_proj.weight": random_matrix(width, width, 3.0),
            f"{at}.self_attn.k_proj.weight": random_matrix(kv_width, width),
            f"{at}.self_attn.v_proj.weight": random_matrix(kv_width, width, 2.0),
            f"{at}.self_attn.o_proj.weight": random_matrix(width, width, 2.0),
            f"{at}.mlp.gate_proj.weight": random_matrix(inner, width),
            f"{at}.mlp.up_proj.weight": random_matrix(inner, width),
            f"{at}.mlp.down_proj.weight": random_matrix(width, inner),
        }
    save_file(weights, str(folder / "model.safetensors"))
    return folder


@functools.cache
def tiny_model_dir() -> str:
    """Return this process's folder with the config.json of `TINY_LLAMA`, for `load_format="dummy"`."""
    folder = tempfile.mkdtemp(prefix="neuron-sched-llama-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder
