"""pandas, scipy, scikit-learn and matplotlib work in workers that train, with the numpy that they were made for."""

from __future__ import annotations

import io

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, dense_network, mx, numbers


@pytest.fixture(autouse=True)
def _training(rank):
    """A step before the package is used, and one after it."""
    net = dense_network(3)
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})

    def step():
        with mx.autograd.record():
            loss = (net(array(numbers(rank, (4, 6)))) ** 2).mean()
        loss.backward()
        trainer.step(4)
        return loss.asnumpy().item()

    first = step()
    yield
    assert step() < first and mykv.check_in_step(net.collect_params()) is None


@pytest.mark.ranks(2)
def test_pandas(rank):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"rank": [rank] * 4, "loss": [1.0, np.nan, 3.0, 2.0], "name": list("abab")})
    means = table.dropna().groupby("name").loss.mean()
    assert means.to_dict() == {"a": 2.0, "b": 2.0}
    assert pandas.read_csv(io.StringIO(table.to_csv(index=False))).equals(table)
    assert table.loss.isna().sum() == 1 and table.describe().loc["max", "loss"] == 3
    dates = pandas.date_range("2024-01-01", periods=4)
    assert table.set_index(dates).loss.resample("2D").max().tolist() == [1.0, 3.0]
    moved = mx.nd.array(table.loss.fillna(0)).asnumpy()
    assert moved.tolist() == [1, 0, 3, 2] and str(table.loss.dtype) == "float64"


@pytest.mark.ranks(2)
def test_scipy(rank):
    optimize, sparse, special, stats = (
        pytest.importorskip(f"scipy.{name}") for name in ("optimize", "sparse", "special", "stats")
    )
    found = optimize.minimize(lambda x: ((x - [1, 2]) ** 2).sum(), np.zeros(2))
    assert found.success and np.allclose(found.x, [1, 2], atol=1e-4)
    matrix = sparse.csr_matrix(([1.0, 2.0], ([0, 1], [1, 0])), shape=(2, 2))
    assert (matrix @ np.ones(2)).tolist() == [1, 2]
    moved = mx.nd.sparse.csr_matrix((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    assert moved.asnumpy().tolist() == matrix.toarray().tolist() == [[0, 1], [2, 0]]
    assert special.expit(0.0) == 0.5 and stats.norm.cdf(0) == 0.5
    assert stats.spearmanr([1, 2, 3], [2, 4, 9]).correlation == pytest.approx(1)


@pytest.mark.ranks(2)
def test_scikit_learn(rank):
    pytest.importorskip("sklearn")
    from sklearn import datasets, linear_model, metrics, model_selection, pipeline, preprocessing

    inputs, labels = datasets.load_iris(return_X_y=True)
    model = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression())
    assert model_selection.cross_val_score(model, inputs, labels, cv=3).mean() > 0.9
    probabilities = model.fit(inputs, labels).predict_proba(inputs)
    assert metrics.log_loss(labels, probabilities) < 0.3
    assert metrics.roc_auc_score(labels == 2, mx.nd.array(probabilities).asnumpy()[:, 2]) > 0.9
    assert datasets.load_digits().images.shape == (1797, 8, 8)


@pytest.mark.ranks(2)
def test_matplotlib(rank):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2)
    left.plot(mx.nd.arange(5).asnumpy(), label=f"rank {rank}")
    left.legend()
    right.hist(mx.nd.array([1, 2, 2, 3]).asnumpy(), bins=3)
    right.imshow(np.random.RandomState(0).rand(4, 4))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    pyplot.close(figure)
    assert picture.getvalue()[1:4] == b"PNG"


@pytest.mark.ranks(1)
def test_numpy_keeps_its_own_names():
    if int(np.__version__.partition(".")[0]) < 2:
        pytest.skip("this numpy has the old names itself")
    assert not [name for name in ("NaN", "PINF", "float_", "product") if hasattr(np, name)]
    assert np.bool is np.bool_ and repr(np.float64(0.5)) == "np.float64(0.5)"
