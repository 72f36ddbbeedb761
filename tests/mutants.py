"""Planted faults, and the test that each of them must make fail.

    python -m tests.mutants [NAME ...] [--sound]    a row a mutant; --sound: each test once without the fault, too

A mutant is the package with one text replaced. Its test runs in a process of its own, on a copy of the package in a
temporary folder beside links to everything else; the repository is not written. Laws: the text stands exactly once in
its file; the test fails by what it asserts, or by what the package raises, never because the mutant cannot be imported.
`test_mutants.py` runs those that are quick; `slow` ones are for the command.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = 1  # pytest's exit code where tests have failed, and nothing else went wrong
NOT_BY_THE_TEST = r"^E +(ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError)\b"


@dataclass(frozen=True)
class Mutant:
    name: str  # the law that it breaks
    file: str  # below dora_jax/
    old: str
    new: str
    killer: str  # below tests/
    slow: bool = False


MUTANTS = (
    Mutant(
        "a_late_answer_of_an_earlier_move_counts",
        "orchestrate/transitions.py",
        " and unit.attempt == event.attempt",
        "",
        "test_orchestrator_ends.py::test_a_move_is_answered_under_its_own_attempt",
    ),
    Mutant(
        "a_snapshot_loses_failed_moves",
        "orchestrate/snapshot.py",
        'set(Unit.__slots__) - {"dst", "group", "id"}',
        'set(Unit.__slots__) - {"dst", "group", "id", "failed_moves"}',
        "test_payload_replay.py::test_a_snapshot_holds_all_of_a_sample",
    ),
    Mutant(
        "tokens_of_a_moved_sample_lose_their_first_instance",
        "orchestrate/transitions.py",
        "        unit.ran += here\n",
        "        unit.ran = here\n",
        "test_orchestrator_ends.py::test_a_sample_that_moved_away_is_not_trained_with_tokens_of_where_it_was",
    ),
    Mutant(
        "any_member_passes_for_the_controller",
        "runtime/cluster/connection.py",
        "lambda peer: peer.role == CONTROLLER and peer.incarnation >= self._controller",
        "lambda peer: True",
        "test_channel.py::test_what_poses_as_the_controller_is_found_out",
    ),
    Mutant(
        "an_offer_is_served_to_any_member",
        "runtime/transfer/device_transfer.py",
        'key is None or channel.peer != (key.receiver.partition("/")[0], key.epoch)',
        "key is None",
        "test_channel.py::test_a_transfer_is_served_to_whom_it_is_for_alone",
    ),
    Mutant(
        "a_certificate_ends_by_the_clock",
        "runtime/common/credentials.py",
        "datetime.datetime(9999, 12, 31, 23, 59, 59)",
        "datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=30)",
        "test_channel.py::test_a_host_whose_clock_is_an_hour_off_is_let_in",
    ),
    Mutant(
        "plain_pieces_may_come_in_any_order",
        "runtime/common/channel.py",
        "        self._pieces += 1\n",
        "",
        "test_channel.py::test_what_is_changed_between_ends_a_plain_transfer",
    ),
    Mutant(
        "controller_json_is_readable_by_all",
        "runtime/cluster/run_registry.py",
        "0o600",
        "0o644",
        "test_run_registry.py::test_only_its_owner_reads_the_key_of_the_authority",
    ),
    Mutant(
        "the_digest_at_start_is_not_checked",
        "runtime/journal/resume.py",
        "published.digest != made:",
        "published.digest == made + 1:",
        "test_resume_laws.py::test_other_weights_than_the_run_began_with_are_refused",
    ),
    Mutant(
        "the_optimizer_state_is_not_restored",
        "runtime/journal/resume.py",
        "self.trainer.load(restored.params, restored.opt_state, self.step)",
        "self.trainer.load(restored.params, self.trainer.abstract_state().opt_state, self.step)",
        "test_resume_laws.py::test_all_that_was_saved_reaches_the_trainer",
    ),
    Mutant(
        "the_trainer_keeps_its_own_optimizer_state",
        "trainer/step.py",
        "            jax.device_put(opt_state, self.shardings.opt_state),\n            jax.device_put(np.int32(step)",
        "            self.state.opt_state,\n            jax.device_put(np.int32(step)",
        "test_resume_laws.py::test_a_trainer_goes_on_with_the_optimizer_state_that_it_was_given",
    ),
    Mutant(
        "a_manifest_is_not_made_durable",
        "base/state_files.py",
        "        out.flush()\n        os.fsync(out.fileno())\n    os.replace",
        "        out.flush()\n    os.replace",
        "test_durable_order.py::test_a_manifest_is_put_after_the_files_that_it_names_and_before_their_folders",
    ),
    Mutant(
        "files_are_not_durable_before_their_manifest",
        "trainer/manifest.py",
        "checksum(path, durable=True)] for path in paths",
        "checksum(path)] for path in paths",
        "test_durable_order.py::test_a_manifest_is_put_after_the_files_that_it_names_and_before_their_folders",
    ),
    Mutant(
        "the_rename_of_a_manifest_is_not_durable",
        "trainer/manifest.py",
        "        sync_folder(folder)\n\n\ndef fault",
        "        folder.exists()\n\n\ndef fault",
        "test_durable_order.py::test_a_manifest_is_put_after_the_files_that_it_names_and_before_their_folders",
    ),
    Mutant(
        "a_new_segment_is_not_durable_before_it_stands",
        "runtime/journal/log_stores.py",
        "                write_all(fd, data)\n                os.fsync(fd)\n                os.rename",
        "                write_all(fd, data)\n                os.rename",
        "test_durable_order.py::test_a_segment_is_durable_before_it_has_its_name_and_the_name_before_records_follow",
    ),
    Mutant(
        "the_rename_of_a_segment_is_not_durable",
        "runtime/journal/log_stores.py",
        "                sync_folder(self._dir)\n            except BaseException:",
        "                self._dir.exists()\n            except BaseException:",
        "test_durable_order.py::test_a_segment_is_durable_before_it_has_its_name_and_the_name_before_records_follow",
    ),
    # ---- of our own
    Mutant(
        "the_number_of_a_frame_is_not_checked",
        "runtime/journal/frames.py",
        "    if place and place != [segment, index]:",
        "    if False:",
        "test_event_log_frames.py::test_a_frame_that_is_not_in_its_place_ends_the_reading",
    ),
    Mutant(
        "a_newer_journal_is_stepped_over",
        "runtime/journal/recovery.py",
        "            unknown[number] = error\n            continue",
        "            notify(str(error))\n            continue",
        "test_newer_journals.py::test_a_newest_segment_of_another_version_is_refused_and_nothing_changes",
    ),
    Mutant(
        "what_a_checkpoint_restores_to_is_not_compared",
        "trainer/checkpoint.py",
        "    if digests and held and (fault := difference(digests, held)):",
        "    if False and (fault := difference(digests, held)):",
        "test_checkpoint_trust.py::test_a_step_killed_before_its_manifest_is_adopted_on_another_mesh_where_its_digests_agree",
    ),
    Mutant(
        "a_group_may_be_one_version_too_old",
        "orchestrate/ledger.py",
        "all(self.base <= v + self.max_lag for v in members)",
        "all(self.base <= v + self.max_lag + 1 for v in members)",
        "test_ledger.py::test_a_member_past_its_deadline_is_not_taken",
    ),
    Mutant(
        "the_sum_of_outstanding_groups_is_off_by_one",
        "orchestrate/ledger.py",
        "            if after > (u + lag - self.base) * self.groups_per_step + missing:",
        "            if after > (u + lag - self.base) * self.groups_per_step + missing + 1:",
        "test_ledger.py::test_young_groups_pass_a_straggler_until_its_deadline",
    ),
    Mutant(
        "a_prefix_is_shared_across_versions",
        "rollout/pages.py",
        "siblings = self._roots.setdefault(version, {})",
        "siblings = self._roots.setdefault(min(self._roots, default=version), {})",
        "test_pages.py::test_a_prefix_of_another_version_is_not_shared",
    ),
    Mutant(
        "a_prefix_is_evicted_while_another_sample_uses_it",
        "rollout/pages.py",
        "            node.users -= 1\n            if node.users == 0:",
        "            node.users = 0\n            if node.users == 0:",
        "test_pages.py::test_random_use_conserves_pages",
    ),
    Mutant(
        "a_page_is_free_twice",
        "rollout/pages.py",
        "            del self._owner[full]\n            self._free.append(full)",
        "            del self._owner[full]\n            self._free += [full, full]",
        "test_pages.py::test_random_use_conserves_pages",
    ),
    Mutant(
        "a_group_is_trained_twice_after_a_restart",
        "runtime/journal/payload_state.py",
        "self.scored.pop(group_id) for group_id in state.ledger.batch",
        "self.scored[group_id] for group_id in state.ledger.batch",
        "test_payload_replay.py::test_a_group_that_was_trained_is_forgotten",
    ),
    Mutant(
        "a_replay_drops_sample_cancelled",
        "runtime/journal/payload_state.py",
        "            case ev.SampleCancelled(id=id):\n                self.partial.pop(id, None)",
        "            case ev.SampleCancelled(id=id):\n                pass",
        "test_payload_replay.py::test_the_tokens_of_a_cancelled_sample_are_forgotten",
    ),
    Mutant(
        "facts_are_sent_before_they_are_written",
        "runtime/journal/journaled_world.py",
        "            self._journal.commit(urgent=ev.StepPublished in kinds)",
        "            self._journal.sync_soon()",
        "test_payload_replay.py::test_a_fact_is_in_the_journal_before_the_orchestrator_has_it",
    ),
    Mutant(
        "temperature_is_ignored_in_logprobs",
        "models/logits.py",
        "elif temperature != 1.0:",
        "elif temperature != temperature:",
        "test_numeric_laws.py::test_logprobs_are_of_the_tempered_distribution",
    ),
    Mutant(
        "denominators_are_of_each_micro_batch",
        "trainer/micro_batch.py",
        '    weight = jnp.where(mask, arrays["loss_weights"], 0.0)',
        '    weight = jnp.where(mask, arrays["loss_weights"] / jnp.sum(arrays["loss_weights"]), 0.0)',
        "test_trainer_equal.py::test_micro_batches[2]",
    ),
    Mutant(
        "observed_tokens_are_trained",
        "buffer/pack.py",
        "mask[i, at : at + n], logprobs[i, at : at + n] = sample.mask, sample.logprobs",
        "mask[i, at : at + n], logprobs[i, at : at + n] = True, sample.logprobs",
        "test_pack.py::test_observed_tokens_and_spans",
    ),
    Mutant(
        "the_last_page_is_lost_on_the_way",
        "runtime/transfer/kv_transfer.py",
        "pages = -(-offered.kv_len // offered.page_size)",
        "pages = offered.kv_len // offered.page_size",
        "test_kv_transfer.py::test_pages_arrive_bit_equal_and_the_sample_goes_on_as_if_it_had_stayed",
        slow=True,
    ),
    Mutant(
        "pages_of_the_last_process_are_lost_on_the_way",
        "rollout/migrate.py",
        "pieces[i // alike] for name, pieces in cut.items()",
        "pieces[0] for name, pieces in cut.items()",
        "test_numeric_laws.py::test_pages_of_all_processes_make_the_whole",
    ),
    Mutant(
        "a_version_retires_while_samples_run_at_it",
        "orchestrate/core.py",
        "idle = [v for v in s.alive if v < base and v not in unfinished and v",
        "idle = [v for v in s.alive if v < base and v",
        "test_orchestrator_ends.py::test_a_version_stays_while_a_sample_runs_at_it",
    ),
)


@dataclass(frozen=True)
class Result:
    verdict: str  # killed, survived, or what is wrong with the row
    seconds: float
    output: str


def run(mutant: Mutant, folder: Path, sound: bool = False) -> Result:
    """Runs the mutant's test in `folder`, an empty one. sound: on the package as it is."""
    began = time.monotonic()
    for path in ROOT.iterdir():
        if path.name not in ("dora_jax", "runs", ".git", "build"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "dora_jax", folder / "dora_jax")
    source = folder / "dora_jax" / mutant.file
    text = source.read_text()
    if (times := text.count(mutant.old)) != 1:
        return Result(f"out of date: its text stands {times} times in {mutant.file}", 0.0, "")
    if not sound:
        source.write_text(text.replace(mutant.old, mutant.new))
    test = f"tests/{mutant.killer}"
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, output = time.monotonic() - began, done.stdout + done.stderr
    if sound:
        return Result("passes" if done.returncode == 0 else "fails without the fault", seconds, output)
    if done.returncode == 0:
        return Result("survived", seconds, output)
    if done.returncode != FAILED or re.search(NOT_BY_THE_TEST, output, re.MULTILINE) or " error" in output[-100:]:
        return Result(f"its test could not run (code {done.returncode})", seconds, output)
    return Result("killed", seconds, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sound", action="store_true")
    parser.add_argument("--at_once", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]

    def tried(mutant: Mutant) -> list[Result]:
        results = []
        for sound in (False, True)[: 1 + args.sound]:
            with tempfile.TemporaryDirectory(prefix="mutant.") as folder:
                results.append(run(mutant, Path(folder), sound))
        return results

    failed = 0
    with ThreadPoolExecutor(args.at_once) as pool:
        for mutant, results in zip(chosen, pool.map(tried, chosen), strict=True):
            words = ", ".join(f"{result.verdict} ({result.seconds:.1f} s)" for result in results)
            print(f"{mutant.name:66} {words:40} {mutant.killer}{'  slow' if mutant.slow else ''}", flush=True)
            if [result.verdict for result in results] != ["killed", "passes"][: len(results)]:
                failed += 1
                print(results[-1].output[-3000:])
    print(f"{len(chosen) - failed} of {len(chosen)} are killed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
