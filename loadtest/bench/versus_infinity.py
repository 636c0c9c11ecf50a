from typing import Any

from loadtest.bench.comparison import Other, compare
from loadtest.bench.options import Options
from loadtest.bench.weights_folders import ONNX_FP32, ONNX_INT8

GOAL = 1.5


def run(options: Options) -> dict[str, Any]:
    """Compares with infinity twice: with the unquantised graph, and with the service's own."""
    graphs = {"infinity (float32)": ONNX_FP32, "infinity (the service's int8 graph)": ONNX_INT8}
    found = {
        name: compare(
            options, Other(name, options.infinity, "infinity_app", options.weights / graph, GOAL)
        )
        for name, graph in graphs.items()
    }
    figures = [figure for result in found.values() for figure in result.pop("figures")]
    return {"figures": figures, **found}
