import kvstore_plugin as mykv  # noqa: F401
import mxnet as mx
import pytest
from harness.support import IS_2

NEAR = ["mykw", "MyKw", "my_kv", "mykv ", "mkv", "mykvs"]
# MXNet 2.0 has stores with the names of the two libraries.
OTHERS = ["kvstore_plugin", "Kvstore_Plugin"] + ([] if IS_2 else ["horovod", "Horovod", "byteps"])


@pytest.mark.parametrize("name", NEAR + OTHERS)
def test_name_that_can_only_mean_mykv_is_an_error_and_no_store_of_one_process(name):
    with pytest.raises(ValueError, match="Is 'mykv' meant") as caught:
        mx.kv.create(name)
    assert repr(name) in str(caught.value) and isinstance(caught.value, mx.base.MXNetError)


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
def test_module_refuses_a_name_that_is_almost_mykv():
    output = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1), mx.sym.var("label"))
    module = mx.mod.Module(output, label_names=["label"])
    module.bind([("data", (2, 3))], [("label", (2, 1))])
    module.init_params()
    with pytest.raises(ValueError, match="Is 'mykv' meant"):
        module.init_optimizer(kvstore="mykw")


@pytest.mark.parametrize("name", [*OTHERS[-1:], "mykw"])
def test_trainer_refuses_such_a_name_when_it_is_made(name):
    parameter = mx.gluon.Parameter("weight", shape=(2,))
    parameter.initialize()
    with pytest.raises(ValueError, match="Is 'mykv' meant"):
        mx.gluon.Trainer([parameter], "sgd", kvstore=name)


@pytest.mark.parametrize("name", ["local", "device", "local_allreduce_cpu"])
def test_other_stores_of_mxnet_are_made_as_before(name):
    assert mx.kv.create(name).type == name
    assert mx.kv.create().type == "local"


def test_store_of_another_package_may_have_a_similar_name():
    registry = mx.kv.KVStoreBase.kv_registry
    store = object()
    before = dict(registry)
    registry.update(mykv2=lambda: store, horovod=lambda: store)
    try:
        assert mx.kv.create("MyKV2") is store and mx.kv.create("Horovod") is store
    finally:
        registry.clear()
        registry.update(before)


@pytest.mark.parametrize("name", ["dist_sync", "dist_device_sync", "dist_async"])
def test_stores_with_servers_say_what_to_use_where_no_servers_are(monkeypatch, name):
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ValueError, match="needs a scheduler and servers.* Use kvstore='mykv'"):
        mx.kv.create(name)
