"""Deep Graph Library: graphs are classified with its layers for MXNet, whose sums over edges are custom functions."""

from __future__ import annotations

import os
from typing import Any, Callable

from comparison import Case, Curve, digest, main

os.environ["DGLBACKEND"] = "mxnet"

_GRAPHS = 96
_BATCH_SIZE = 16  # of all workers together
_EPOCHS = 3


def _data(rng):
    """Random graphs of two classes, with 8 values at each node that are larger in one class."""
    import dgl
    import mxnet as mx

    graphs, labels = [], []
    for _ in range(_GRAPHS):
        nodes = rng.randint(5, 14)
        edges = rng.randint(nodes, 3 * nodes)
        graph = dgl.graph((rng.randint(0, nodes, edges), rng.randint(0, nodes, edges)), num_nodes=nodes)
        graph = dgl.add_self_loop(graph)
        labels.append(rng.randint(2))
        graph.ndata["x"] = mx.nd.array(rng.rand(nodes, 8) + 0.5 * labels[-1])
        graphs.append(graph)
    return graphs, labels


def _network(layers: Callable[[Any], tuple]):
    import dgl
    import dgl.nn.mxnet
    from mxnet import gluon

    class Network(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.first, self.second = layers(dgl.nn.mxnet)
                self.output = gluon.nn.Dense(2)

        def forward(self, graph):
            hidden = graph.ndata["x"]
            for layer in (self.first, self.second):
                hidden = layer(graph, hidden).reshape((graph.num_nodes(), -1))
            with graph.local_scope():
                graph.ndata["h"] = hidden
                return self.output(dgl.mean_nodes(graph, "h"))

    return Network()


def _train(layers: Callable[[Any], tuple], trainer_of: Callable[[Any, dict], Any], is_sum: bool = False) -> Curve:
    import dgl
    import kvstore_plugin as hvd
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    graphs, labels = _data(np.random.RandomState(0))
    net = _network(layers)
    mx.random.seed(5 + rank)
    net.initialize(mx.init.Uniform(0.3), force_reinit=True)
    net(graphs[0])  # gives the shapes
    hvd.broadcast_parameters(net.collect_params())
    trainer = trainer_of(net.collect_params(), {"learning_rate": 0.01})
    loss_of, losses, share = gluon.loss.SoftmaxCrossEntropyLoss(), [], _BATCH_SIZE // size
    for first in list(range(0, _GRAPHS, _BATCH_SIZE)) * _EPOCHS:
        mine = range(first + rank * share, first + rank * share + share)
        with autograd.record():
            loss = loss_of(net(dgl.batch([graphs[one] for one in mine])), mx.nd.array([labels[one] for one in mine]))
        loss.backward()
        trainer.step(_BATCH_SIZE if is_sum else share)
        losses.append(float(loss.mean().asscalar()))
    return Curve(losses, digest(net))


def _convolution() -> Curve:
    import mxnet as mx

    def layers(nn):
        return (nn.GraphConv(8, 32, activation=mx.nd.relu), nn.GraphConv(32, 32, activation=mx.nd.relu))

    def trainer(parameters, options):
        return mx.gluon.Trainer(parameters, "adam", options, kvstore=mx.kv.create("mykv"))

    return _train(layers, trainer, is_sum=True)


def _attention() -> Curve:
    import kvstore_plugin as hvd

    return _train(
        lambda nn: (nn.GATConv(8, 16, 2), nn.GATConv(32, 32, 1)),
        lambda parameters, options: hvd.DistributedTrainer(parameters, "adam", options),
    )


def _sampled() -> Curve:
    import kvstore_plugin as hvd

    return _train(
        lambda nn: (nn.SAGEConv(8, 32, "mean"), nn.SAGEConv(32, 32, "pool")),
        lambda parameters, options: hvd.DistributedTrainer(parameters, "adam", options, update_on_kvstore=True),
    )


_CASES = [
    Case("GraphConv, stock Trainer", _convolution),
    Case("GATConv, DistributedTrainer", _attention),
    Case("SAGEConv, optimizer on the store", _sampled),
]

if __name__ == "__main__":
    main(_CASES)
