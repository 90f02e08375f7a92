"""Ray on this machine for tests, and replicas that several of them use one after the other."""

from contextlib import ExitStack, contextmanager, nullcontext

from beamwright.cluster.serving import Cluster


@contextmanager
def local_ray(cpus):
    """A cluster of this process. cpus: that Ray counts, however many there are."""
    import ray

    ray.init(
        "local", num_cpus=cpus, include_dashboard=False, configure_logging=False,
        log_to_driver=False, object_store_memory=80_000_000,
    )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def kept_replicas(number):
    """Gives a ClusterSolver per settings, as a context that leaves it open."""
    from beamwright.cluster.solver import ClusterSolver

    with local_ray(cpus=16 * number), ExitStack() as stack:
        made = {}

        def keep(settings):
            key = settings.model_dump_json(exclude_unset=True)
            if key not in made:
                made[key] = stack.enter_context(ClusterSolver(Cluster(None, number), settings))
            return nullcontext(made[key])

        yield keep
