"""The tests are one package: a helper is imported as `tests.fakes.NAME` wherever pytest or a process starts."""
