"""transformers on torch as a peer: `python hf_worker.py FOLDER` in an environment that has both."""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Workload, serve

transformers.logging.set_verbosity_error()
config = AutoConfig.from_pretrained(sys.argv[1])
auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
model = auto.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


@torch.inference_mode()
def run(workload: Workload) -> object:
    ids = torch.from_numpy(workload.ids(config.vocab_size))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=workload.new,
        num_beams=workload.beams,
        **(sampling if workload.sample else {"do_sample": False}),
    )


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
serve({"peer": "HF torch", "version": version}, run)
