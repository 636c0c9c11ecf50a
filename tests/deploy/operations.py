"""The operations of the service, by which of several services has to answer them."""

from service.app import openapi_document

_OF_INDEX = "/indexes/{index}"
# Those of POST that change nothing, without the path of an index.
_READING = {"/search", "/search/batch", "/reload", "/index/reload", "/v1/embeddings"}


def operations() -> list[tuple[str, str]]:
    """Returns methods and paths of all operations of the OpenAPI document."""
    return [
        (method.upper(), path)
        for path, methods in openapi_document()["paths"].items()
        for method in methods
    ]


def needs_writer(method: str, path: str) -> bool:
    """Whether an operation changes an index, or asks the writer process what became of a write."""
    of_one = path.removeprefix(_OF_INDEX)
    if method == "GET":
        return of_one.startswith("/writes/")
    return method != "POST" or of_one not in _READING
