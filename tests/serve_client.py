"""What a client of the server does, with tritonclient over HTTP and gRPC. Arguments: address, and the folder of the models.

Expected numbers come from numpy and the models' weights.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
from onnx import numpy_helper
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ADDRESS, FOLDER = sys.argv[1:]


def weights(name):
    return {w.name: numpy_helper.to_array(w) for w in onnx.load(f"{FOLDER}/{name}.onnx").graph.initializer}


MIXED, SEQUENCE, JOINT = weights("mixed"), weights("sequence"), weights("joint")


class Http:
    module = tritonclient.http

    def __init__(self, binary=True, concurrency=1):
        self.client = self.module.InferenceServerClient(ADDRESS, concurrency=concurrency)
        self.binary = binary

    def metadata(self, model):
        return self.client.get_model_metadata(model)

    def infer(self, model, arrays, outputs=None, datatypes={}, **settings):
        inputs = []
        for name, array in arrays.items():
            inputs.append(self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array, binary_data=self.binary)
            inputs[-1]._datatype = datatypes.get(name, inputs[-1]._datatype)
        if outputs or not self.binary:
            names = outputs or [o["name"] for o in self.metadata(model)["outputs"]]
            outputs = [self.module.InferRequestedOutput(name, binary_data=self.binary) for name in names]
        return self.client.infer(model, inputs, outputs=outputs, request_id="7", **settings)

    @staticmethod
    def version_and_id(result):
        response = result.get_response()
        return response["parameters"]["weight_version"], response["id"]


class Grpc(Http):
    module = tritonclient.grpc

    def __init__(self):
        self.client = self.module.InferenceServerClient(ADDRESS)

    def metadata(self, model):
        return self.client.get_model_metadata(model, as_json=True)

    def infer(self, model, arrays, outputs=None, datatypes={}, **settings):
        inputs = []
        for name, array in arrays.items():
            inputs.append(self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
            inputs[-1]._input.datatype = datatypes.get(name, inputs[-1]._input.datatype)
        outputs = [self.module.InferRequestedOutput(name) for name in outputs] if outputs else None
        return self.client.infer(model, inputs, outputs=outputs, request_id="7", **settings)

    @staticmethod
    def version_and_id(result):
        response = result.get_response()
        return response.parameters["weight_version"].int64_param, response.id


def mixed(samples, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((samples, 3)).astype(np.float32),
        "h": random.standard_normal((samples, 2, 2)).astype(np.float16),
        "ids": random.integers(-1000, 1000, (samples, 2)),
        "on": random.integers(0, 2, samples).astype(bool),
    }


def check_mixed(inputs, result):
    expected = {
        "y": inputs["x"] @ MIXED["weight"] + MIXED["bias"],
        "halved": inputs["h"] * np.float16(0.5),
        "next": inputs["ids"] + 1,
        "off": ~inputs["on"],
    }
    for name, array in expected.items():
        found = result.as_numpy(name)
        assert found.dtype == array.dtype and found.shape == array.shape, (name, found.dtype, found.shape)
        np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6, err_msg=name)


def refused(status, text, call):
    try:
        call()
    except InferenceServerException as error:
        assert str(error.status()).endswith(status), (error.status(), error)
        assert text in error.message(), error
    else:
        raise AssertionError(f"{text}: nothing was refused")


def common(api, invalid, not_found):
    assert api.client.is_server_live() and api.client.is_server_ready() and api.client.is_model_ready("mixed")
    metadata = api.metadata("mixed")
    names = [(t["name"], t["datatype"], [int(s) for s in t.get("shape", [])]) for t in metadata["inputs"]]
    assert names == [("x", "FP32", [-1, 3]), ("h", "FP16", [-1, 2, 2]), ("ids", "INT64", [-1, 2]), ("on", "BOOL", [-1])], names
    assert [t["name"] for t in metadata["outputs"]] == ["y", "halved", "next", "off"]

    for samples in range(1, 9):
        inputs = mixed(samples)
        result = api.infer("mixed", inputs)
        check_mixed(inputs, result)
        assert api.version_and_id(result) == (0, "7")
    chosen = api.infer("mixed", mixed(2), outputs=["off", "y"])
    assert chosen.as_numpy("y").shape == (2, 5) and chosen.as_numpy("next") is None

    for length in (1, 2, 5):
        x = np.random.default_rng(length).standard_normal((3, length, 4)).astype(np.float32)
        found = api.infer("sequence", {"x": x}).as_numpy("sum")
        np.testing.assert_allclose(found, (x @ SEQUENCE["weight"]).sum(1), rtol=1e-4, atol=1e-5)
    for samples in (1, 3):
        x = np.random.default_rng(samples).standard_normal((samples, 2)).astype(np.float32)
        e = np.exp(x * JOINT["weight"])
        np.testing.assert_allclose(api.infer("joint", {"x": x}).as_numpy("share"), e / e.sum(0), rtol=1e-5)

    good = mixed(2)
    refused(not_found, "no model", lambda: api.infer("nobody", good, outputs=["y"]))
    refused(not_found, "no model", lambda: api.metadata("nobody"))
    refused(not_found, "version", lambda: api.infer("mixed", good, outputs=["y"], model_version="2"))
    refused(invalid, "no input", lambda: api.infer("mixed", {**good, "z": good["x"]}))
    refused(invalid, "no output", lambda: api.infer("mixed", good, outputs=["z"]))
    refused(invalid, "asked for twice", lambda: api.infer("mixed", good, outputs=["y", "next", "y"]))
    refused(invalid, "is missing", lambda: api.infer("mixed", {"x": good["x"]}))
    refused(invalid, "shape", lambda: api.infer("mixed", {**good, "x": good["x"][:, :2].copy()}))
    refused(invalid, "samples", lambda: api.infer("mixed", {**good, "x": good["x"][:1]}))
    refused(invalid, "FP32, not FP64", lambda: api.infer("mixed", {**good, "x": good["x"].astype(np.float64)}))
    refused(invalid, "BYTES", lambda: api.infer("mixed", good, datatypes={"x": "BYTES"}))
    refused(invalid, "more than the 16", lambda: api.infer("mixed", mixed(17)))
    refused(invalid, "32-bit", lambda: api.infer("mixed", {**good, "ids": good["ids"] + (1 << 40)}))


def concurrent(make, workers=16, rounds=12):
    def work(worker):
        api = make()
        for round in range(rounds):
            inputs = mixed(1 + (worker + round) % 8, seed=worker * rounds + round)
            check_mixed(inputs, api.infer("mixed", inputs))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))


common(Http(), "400", "404")
common(Http(binary=False), "400", "404")
common(Grpc(), "INVALID_ARGUMENT", "NOT_FOUND")
concurrent(Http)
concurrent(Grpc)
inputs = mixed(4)
packed = Http()
for coding in ("gzip", "deflate"):
    settings = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    check_mixed(inputs, packed.infer("mixed", inputs, **settings))
assert len(packed.client.get_model_repository_index()) == 3
assert packed.client.get_model_config("mixed")["max_batch_size"] == 16
assert packed.client.get_model_config("joint")["max_batch_size"] == 0
statistics = Grpc().client.get_inference_statistics("mixed", as_json=True)["model_stats"][0]
assert int(statistics["execution_count"]) < int(statistics["inference_count"])
print("ok")
