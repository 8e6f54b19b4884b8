"""llama.cpp as a peer: `python llamacpp_worker.py MODEL.gguf`, where llama-cpp-python is installed.

All rows are sequences of one context; a decode step is one batch of a token of each.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp as llama
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Workload, serve

BATCH, THREADS = 2048, 2
silent = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(silent, ctypes.c_void_p(0))
llama.llama_backend_init()
model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


def context(work: Workload):
    slots = -(-(work.prompt + work.new) // 256) * 256
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max = work.batch * slots, work.batch
    params.n_batch, params.n_ubatch = BATCH, 512
    params.n_threads = params.n_threads_batch = THREADS
    params.kv_unified = False
    return llama.llama_init_from_model(model, params)


def sampler(work: Workload):
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if work.sample:
        steps = (
            llama.llama_sampler_init_top_k(50),
            llama.llama_sampler_init_top_p(0.95, 1),
            llama.llama_sampler_init_temp(0.8),
            llama.llama_sampler_init_dist(0),
        )
        for step in steps:
            llama.llama_sampler_chain_add(chain, step)
    return chain


class Rows:
    """The sequences of one call."""

    def __init__(self, work: Workload) -> None:
        self.work, self.context, self.sampler = work, context(work), sampler(work)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.tokens = [0] * work.batch

    def add(self, token: int, position: int, row: int, last: bool) -> int:
        place = self.batch.n_tokens
        self.batch.token[place], self.batch.pos[place] = token, position
        self.batch.logits[place] = last
        self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, row
        self.batch.n_tokens = place + 1
        return place

    def decode(self, ends: dict[int, int]) -> None:
        """Runs the batch; `ends` has the place of each row's last token."""
        assert llama.llama_decode(self.context, self.batch) == 0
        for row, place in ends.items():
            self.tokens[row] = self.choose(place)
        self.batch.n_tokens = 0

    def choose(self, place: int) -> int:
        if self.work.sample:
            return llama.llama_sampler_sample(self.sampler, self.context, place)
        logits = llama.llama_get_logits_ith(self.context, place)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_sampler_free(self.sampler)
        llama.llama_free(self.context)


def run(work: Workload) -> object:
    assert work.beams == 1, "llama.cpp has no beam search"
    rows = Rows(work)
    ends: dict[int, int] = {}
    for row, prompt in enumerate(work.ids(vocabulary)):
        if rows.batch.n_tokens + len(prompt) > BATCH:
            rows.decode(ends)
            ends = {}
        for position, token in enumerate(prompt):
            place = rows.add(int(token), position, row, position == len(prompt) - 1)
        ends[row] = place
    rows.decode(ends)
    for step in range(work.new - 1):
        position = work.prompt + step
        rows.decode(
            {row: rows.add(rows.tokens[row], position, row, True) for row in range(work.batch)}
        )
    rows.close()


serve({"peer": "llama.cpp", "version": f"llama-cpp-python {llama.__version__}"}, run)
