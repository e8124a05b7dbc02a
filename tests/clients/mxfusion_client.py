"""MXFusion: a sparse Gaussian process, trained by its own loop. Each worker has other random names of parameters."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re

from comparison import WORKERS, Case, Curve, main

_POINTS = 240
_ITERATIONS = 40


def _model():
    from mxfusion import Model, Variable
    from mxfusion.components.distributions.gp.kernels import RBF
    from mxfusion.components.variables import PositiveTransformation
    from mxfusion.modules.gp_modules import SVGPRegression

    model = Model()
    model.N = Variable()
    model.X = Variable(shape=(model.N, 1))
    model.noise = Variable(shape=(1,), transformation=PositiveTransformation(), initial_value=0.5)
    model.kernel = RBF(input_dim=1, variance=1, lengthscale=1)
    model.Y = SVGPRegression.define_variable(
        X=model.X, kernel=model.kernel, noise_var=model.noise, shape=(model.N, 1), num_inducing=10
    )
    model.Y.factor.svgp_log_pdf.jitter = 1e-2
    return model


def _train():
    import kvstore_plugin as hvd
    import mxnet as mx
    import numpy as np

    np.int, np.float = int, float  # names that numpy has dropped since
    from mxfusion.inference import MAP, GradBasedInference, MinibatchInferenceLoop

    mx.gluon.Trainer = hvd.DistributedTrainer
    rng = np.random.RandomState(0)
    inputs = rng.uniform(-3, 3, (_POINTS, 1))
    outputs = np.sin(inputs) + 0.05 * rng.randn(_POINTS, 1)
    mine = slice(hvd.rank(), None, hvd.size())
    inputs, outputs = mx.nd.array(inputs[mine]), mx.nd.array(outputs[mine])
    model = _model()
    # The likelihood of a worker's points stands for that of all points.
    loop = MinibatchInferenceLoop(batch_size=len(inputs), rv_scaling={model.Y: float(hvd.size())})
    inference = GradBasedInference(MAP(model=model, observed=[model.X, model.Y]), grad_loop=loop)
    inference.initialize(X=inputs.shape, Y=outputs.shape)
    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    inference.params[model.Y.factor.inducing_inputs] = mx.nd.random.uniform(-3, 3, (10, 1))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        inference.run(max_iter=_ITERATIONS, learning_rate=0.05, verbose=True, X=inputs, Y=outputs)
    losses = [float(one) for one in re.findall(r"epoch-loss: (\S+)", printed.getvalue())]
    least = losses[0] - 1000.0  # the loss is a negative logarithm, which may be below 0: it is shown from 1000 on
    values = inference.params.param_dict.values()
    weights = hashlib.sha256(b"".join(one.data().asnumpy().tobytes() for one in values)).hexdigest()
    return Curve([one - least for one in losses], weights)


_CASES = [Case(f"sparse Gaussian process, random names on {WORKERS} workers", _train, allowed=1e-3)]

if __name__ == "__main__":
    main(_CASES)
