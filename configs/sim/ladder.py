# python -m dora_jax.simulate --config=configs/sim/ladder.py
"""The step-time ladder of a public DAPO run on TPU7x, from chip constants: no figure of the ladder is fitted.

Source: vllm-project/tpu-inference, pull request 3165 (Qwen3-0.6B, synchronous, 256 prompts x 8 answers): 616 s a step,
369 with fused decode steps, 327 with other blocks of the attention kernel, 299 with a check for the end every 8 steps;
of the last decode takes 64 %, training 24 %, set-up 12 %.

    published       256 x 8 samples, answers cut at 8,192 tokens, rows of 24,576 in the trainer, 16 instances of 4
                    devices,
                    60 % of memory for the engine, a batch 83 % full: 6,800 tokens an answer where the longest is cut
    other threads   a host's part of an unfused step 10 ms (pull request 3117: 15.6 ms a token, less a step's 5.4 ms),
                    once
                    every 128 steps where they are fused; the old blocks read at 1 / 1.49 of the speed (3102); a check
                    for the end 0.216 ms (3509)
    assumed         "64 chips" are 64 JAX devices, half a chip each (its 57 GB of KV are 60 % of 96); log-normal
                    lengths;
                    prompts of 160 tokens; the trainer repeats a forward pass and reaches 35 % of its FLOP/s; decode
                    reaches 80 % of the bandwidth, and 5 ms of a step are no roofline (both as in every simulation
                    here); 2 s until a version is published, 1 s for rewards, 0.1 s for a message (as in sim/fair.py)

What comes out: each step of the ladder as a share of the first, and the three shares of the last, within 10 points. The
seconds do not: the run takes 2.5 times as long as this, 2.3 times in decode, 2.4 in training and 10 in set-up, of which
a chip's constants know nothing. Argument `sensitivity`: the last step of the ladder with one assumption changed a row.

    share of the last step, %                 decode   training   set-up    seconds
    the run                                       64         24       12        299
    as assumed                                    71         26        3        120
    64 whole chips                                77         19        4         84
    answers of 5,000 / 7,800 tokens          68 / 72    29 / 25    3 / 3  109 / 127
    prompts of 1,000 tokens                       74         24        3        132
    the trainer pads no row                       91          5        4         94
    no forward pass is repeated                   76         21        3        113
    trainer at 20 % of its FLOP/s                 59         38        2        144
    decode at 60 % of the bandwidth               75         23        3        138
    2.5 / 10 ms of a step are no roofline    66 / 79    30 / 19    3 / 2  103 / 162
"""

from dora_jax.sim import config

STEP_S = {"no fused steps": 616, "fused decode": 369, "kernel blocks": 327, "end checked every 8": 299}
TRAIN_S = 75  # in each of them
STEP_OVERHEAD_S, HOST_S, FUSED_STEPS, END_CHECK_S = 0.005, 0.0102, 128, 0.000216
BANDWIDTH, OLD_BLOCKS = 0.8, 1 / 1.49


def get_config(arg=None):
    if arg not in (None, "sensitivity"):
        raise ValueError(f"the argument {arg!r} is not sensitivity")
    c = config.defaults()
    c.steps, c.warmup_steps, c.report_tokens, c.modes = 4, 1, 512, ("sync",)
    c.model.size = "Qwen3-0.6B"
    c.hardware.chip, c.hardware.chips, c.hardware.rollout_chips = "tpu7x", 32, 0
    c.hardware.tensor, c.hardware.slots, c.hardware.hbm_share = 2, 256, 0.6
    c.cost.train_row_tokens, c.cost.train_recomputed = 24576, 1.0
    c.cost.publish_s, c.cost.control_s = 2.0, 0.1
    c.workload.max_new_tokens, c.workload.mean_tokens, c.workload.prompt_tokens = 8192, 6800.0, 160.0
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 256, 8
    c.rows = _ladder() if arg is None else _sensitivity()
    return c


def _ladder():
    fused = HOST_S / FUSED_STEPS
    rungs = ((HOST_S, OLD_BLOCKS, 1), (fused, OLD_BLOCKS, 1), (fused, 1, 1), (fused, 1, 8))
    return tuple(_row(name, *rung) for name, rung in zip(STEP_S, rungs, strict=True))


def _row(name, host_s, blocks, checked_every):
    overhead_s = STEP_OVERHEAD_S + host_s + END_CHECK_S / checked_every
    first = STEP_S["no fused steps"]
    return {"label": name, "mode": "sync",
            "set": {"cost.decode_overhead_s": overhead_s, "cost.hbm_efficiency": BANDWIDTH * blocks},
            "published": {"step_min": STEP_S[name] / 60, "rollout_only": 1 - TRAIN_S / STEP_S[name],
                          "tokens_per_s": first / STEP_S[name], "fitted": 0.0, "misfit": 0.0}}  # fmt: skip


def _sensitivity():
    last = {key: value for key, value in _ladder()[-1].items() if key != "published"}
    changes = {
        "as assumed": {},
        "64 whole chips": {"hardware.chips": 64, "hardware.tensor": 4},
        "5,000 tokens an answer": {"workload.mean_tokens": 5000.0},
        "7,800 tokens an answer": {"workload.mean_tokens": 7800.0},
        "prompts of 1,000 tokens": {"workload.prompt_tokens": 1000.0},
        "the trainer pads no row": {"cost.train_row_tokens": 0},
        "no forward pass is repeated": {"cost.train_recomputed": 0.0},
        "trainer at 20 % of its FLOP/s": {"cost.train_utilisation": 0.2},
        "decode at 60 % of the bandwidth": {"cost.hbm_efficiency": 0.6},
        "2.5 ms of a step are no roofline": {"cost.decode_overhead_s": 0.0025},
        "10 ms of a step are no roofline": {"cost.decode_overhead_s": 0.01},
        "nothing but chips and links": {"cost.publish_s": 0.0, "cost.control_s": 0.0, "cost.score_s": 0.0},
    }
    return tuple({**last, "label": name, "set": {**last["set"], **change}} for name, change in changes.items())
