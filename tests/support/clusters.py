"""Ray on this machine for tests."""

from contextlib import contextmanager


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
