"""Many processes: the same orchestrator, loop, journal and scorer in a controller; the stages that compute in gangs.

    controller  python -m dora_jax.train: LocalWorld whose workers are stand-ins (remote_rollout.py, remote_trainer.py)
       | links: records of calls.py, encoded by runtime/codec.py, nothing that is read is ever run (connection.py)
    gang        N processes that live and die together, one jax.distributed world, one epoch (gang.py, host.py)
       trainer      one Trainer, pjit over the gang           rollout      one Engine, tensor parallel over the gang

Reading order: calls, link, launcher, gang, keeper, host, remote, learner, weights, parts, elastic, body. Laws: two roles
never share a world; the first death ends its gang at once and a new one gets a new epoch; nothing of an earlier epoch
is heard; gangs outlive a controller that is killed, and the next one takes them over (run_registry.py, controller_connection.py, memory.py);
instances come and go during a run, with notice without losing a token; Ray is imported by launch_ray.py only.
"""
