"""Python imports this in each process of a service that `tests.failpoints` watches."""

from tests.failpoints import install

install()
