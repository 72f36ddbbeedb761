"""Many processes: the same coordinator, loop, journal and scorer in a controller; the stages that compute in gangs.

    controller  python -m dora_jax.train: a Coordinator whose two workers are remote (remote_rollout.py,
                remote_trainer.py)
       | records of messages.py, encoded by runtime/common/codec.py; nothing that is read is executed (connection.py)
    gang        N processes that live and die together, one jax.distributed world, one epoch (gang.py, process_main.py)
       trainer      one Trainer, pjit over the gang           rollout      one Engine, tensor parallel over the gang
       the trainer's gang is a rollout gang, too, while its devices are lent (lent_gang.py, lent_role.py)

Reading order: messages, connection, launch_process, gang, gang_supervisor, process_main, rollout_role, worker_roles,
remote_rollout, remote_trainer, lent_gang, lent_role, checkpoint_shards, backend. Laws: two roles never share a
jax.distributed world; the first death ends its gang at once, and the next gang gets a new epoch; nothing of an earlier
epoch is accepted; gangs outlive a controller that is killed, and the next controller takes them over (run_registry.py,
connection.py, step_cache.py); instances come and go during a run, and with notice they lose no token; only
launch_ray.py imports Ray.
"""
