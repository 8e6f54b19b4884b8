"""transformers' own Flax classes (up to 4.57) as a peer: `python flax_worker.py FOLDER`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import transformers
from transformers import AutoConfig, FlaxAutoModelForCausalLM, FlaxAutoModelForSeq2SeqLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Workload, serve

_clip = jnp.clip


def clip(x, *bounds, a_min=None, a_max=None):
    """FlaxT5 calls jnp.clip by names that JAX has dropped."""
    return _clip(x, *bounds) if bounds else _clip(x, min=a_min, max=a_max)


jnp.clip = clip
transformers.logging.set_verbosity_error()
config = AutoConfig.from_pretrained(sys.argv[1])
auto = FlaxAutoModelForSeq2SeqLM if config.is_encoder_decoder else FlaxAutoModelForCausalLM
model = auto.from_pretrained(sys.argv[1], from_pt=True)
model.generation_config.eos_token_id = config.vocab_size  # an end token that never comes
model.generation_config.pad_token_id = 0
model.generation_config.forced_eos_token_id = None
if config.is_encoder_decoder:
    model.generation_config.decoder_start_token_id = 0
programs = {}


def run(workload: Workload) -> object:
    start = 1 if config.is_encoder_decoder else workload.prompt
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    options = sampling if workload.sample else {"do_sample": False}
    options |= {"num_beams": workload.beams, "max_length": start + workload.new}

    def call(params, ids, key):
        mask = jnp.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, params=params, prng_key=key, **options)
        return out.sequences

    if workload not in programs:
        programs[workload] = jax.jit(call)
    ids = jnp.asarray(workload.ids(config.vocab_size))
    return jax.block_until_ready(programs[workload](model.params, ids, jax.random.PRNGKey(0)))


version = f"transformers {transformers.__version__}, jax {jax.__version__}"
serve({"peer": "HF Flax", "version": version}, run)
