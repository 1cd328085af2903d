"""What JAX compiles within a test."""

import contextlib

import jax


@contextlib.contextmanager
def no_compilation():
    """Asserts that nothing is compiled within this context."""
    events = []

    def note(name, seconds, **_):
        events.append(name.split("/")[-1])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert "backend_compile_duration" not in events, events
