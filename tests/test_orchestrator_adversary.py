"""The orchestrator against a body that says everything in the worst order (`orchestrator_adversary`), and the
coordinator of production with every thread's turn in the worst order (`coordinator_adversary`).

`python -m tests.fakes.orchestrator_adversary 5000` plays more of the same, with `--stride` as the second test does.
"""

import pytest

from dora_jax.orchestrate.modes import MODES
from tests.fakes import coordinator_adversary
from tests.fakes.orchestrator_adversary import drawn

GAMES = 20  # of each mode


@pytest.mark.parametrize("mode", MODES)
def test_no_order_of_facts_breaks_a_law(mode):
    dropped = 0
    for n in range(GAMES):
        game = drawn(MODES.index(mode) + n * len(MODES))
        assert game.config.mode == mode
        game.play().audit()
        dropped += sum(game.brain.state.dropped.values())
    assert dropped > GAMES  # late facts were there to be dropped


def test_no_order_of_facts_breaks_a_law_with_strides_lent_chips_and_drafts():
    lends = drafts = passed = 0
    for n in range(2 * GAMES):
        game = drawn(n, stride=True).play()
        game.audit()
        lends, drafts = lends + game.chips.lent, drafts + game.chips.drafted
        passed += len(set(range(game.published)) - game.taken)
    assert min(lends, drafts, passed) > GAMES


@pytest.mark.parametrize("mode", MODES)
def test_no_order_of_turns_breaks_a_law_of_the_coordinator(mode):
    for n in range(GAMES // 2):
        game = coordinator_adversary.drawn(MODES.index(mode) + n * len(MODES))
        assert game.config.mode == mode
        game.play().audit()
