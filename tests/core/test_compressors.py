"""The compressors equal a numpy version of their papers bit for bit, and have the papers' properties."""

from __future__ import annotations

import compiled
import hypothesis
import numpy as np
import pytest
from harness import compression_reference as reference
from hypothesis import strategies

_DTYPES = ["float32", "float64"]
_COUNTS = [1, 15, 17, 64, 65, 512, 513, 1500, 65537, 70000]  # around rows, groups, blocks, short indices and samples

_DITHERINGS = [
    ("dithering", {"k": k, "partition": partition, "normalize": normalize, "ef": ef, "seed": 3})
    for partition in ("linear", "natural")
    for normalize in ("max", "l2")
    for k in (1, 5, 20)
    for ef in (True, False)
]
_EVERY = [
    ("2bit", {}),
    ("2bit", {"threshold": 0.7, "ef": False}),
    ("1bit", {}),
    ("1bit", {"threshold": -0.1}),
    ("onebit", {}),
    ("onebit", {"scaling": False}),
    ("topk", {"k": 0.01}),
    ("topk", {"k": 0.3}),
    ("topk", {"k": 17}),
    ("randomk", {"k": 0.1, "seed": 5}),
    ("randomk", {"k": 9, "seed": 2**40 + 1, "ef": False}),
    ("dithering", {}),
    *_DITHERINGS,
    ("dithering", {"k": 30000}),
    ("dithering", {"k": 32, "partition": "natural"}),
]
# Most of the ditherings are left out where hypothesis makes up the values, since each takes long there.
_DRAWN = [one for one in _EVERY if one not in _DITHERINGS[2:]]
# Those whose loss in one step is at most all: (what, its parameters). Not those with levels of a fixed size.
_CONTRACTIONS = [one for one in _EVERY if one[0] not in ("2bit", "1bit") and one[1].get("ef", True)]
_CONTRACTIONS = [one for one in _CONTRACTIONS if one[1].get("scaling", True)]
_UNBIASED = [one for one in _EVERY if one[0] in ("randomk", "dithering") and not one[1].get("ef", True)]


@pytest.fixture(scope="module")
def core():
    """The test module: compressors need no ranks."""
    return compiled.testing


@pytest.fixture
def every_path(core):
    """Every instruction set that runs here, each selected before it is yielded."""
    best = core.kernel_path()

    def each():
        for path in compiled.core.build_info()["kernels"]:
            if core.select_kernel_path(path):
                yield path

    yield each
    core.select_kernel_path(best)


def _normal(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(count).astype(dtype)


def _decoded(compressor, message, values, **more) -> np.ndarray:
    result = np.empty_like(values)
    compressor.decode(message, result, **more)
    return result


def _assert_same_bits(core, name, parameters, values, residual, **more) -> None:
    compressor = core.Compressor(reference.text(name, **parameters))
    left = None if residual is None else residual.copy()
    message = compressor.encode(values, left, **more)
    wanted = reference.compress(name, values, residual, **more, **parameters)
    assert message.tobytes() == wanted[0].tobytes()
    total = {key: value for key, value in more.items() if key == "total"}
    assert _decoded(compressor, message, values, **total).tobytes() == wanted[1].tobytes()
    assert (left is None) == (wanted[2] is None)
    assert left is None or left.tobytes() == wanted[2].tobytes()


def test_the_random_numbers_are_philox():
    """The known answers of the authors' own distribution, Random123."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, output in known:
        assert tuple(reference.philox(np.array([counter], np.uint32), key)[0]) == output


def test_random_numbers_are_counted_by_element_step_and_stream(core, every_path):
    for path in every_path():
        for seed, step, stream in [(0, 0, 0), (2**63 + 7, 2**32 - 1, 2**64 - 1), (5, 9, 2**33 + 1)]:
            numbers = core.random_numbers(seed, step, stream, 1000)
            assert (numbers == reference.random_numbers(seed, step, stream, 1000)).all(), path
            assert (numbers[:100] == core.random_numbers(seed, step, stream, 100)).all(), path
    streams = [core.random_numbers(*one, 1000) for one in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]]
    assert len({stream.tobytes() for stream in streams}) == 4


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name, parameters", _EVERY, ids=[reference.text(n, **p) for n, p in _EVERY])
def test_every_instruction_set_gives_numpys_bits(core, every_path, name, parameters, dtype):
    paths = []
    for path in every_path():
        paths.append(path)
        for count in _COUNTS:
            values, residual = _normal(count, dtype, 1), _normal(count, dtype, 2)
            _assert_same_bits(core, name, parameters, values, residual, step=3, stream=2**40 + count)
        _assert_same_bits(core, name, parameters, values, None, unit=2.5, step=2**32 - 1, total=10 * count)
    assert "generic" in paths


_special = strategies.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, 1e-45, -1e-38, 3e38, -3e38, np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name, parameters", _DRAWN, ids=[reference.text(n, **p) for n, p in _DRAWN])
@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=strategies.data())
def test_whatever_the_values_the_bits_are_numpys(core, name, parameters, dtype, data):
    some = strategies.one_of(_special, strategies.floats(-4, 4, width=32))
    values = np.array(data.draw(strategies.lists(some, min_size=1, max_size=150)), dtype)
    values = np.nan_to_num(values) if data.draw(strategies.booleans()) else values
    with np.errstate(all="ignore"):
        residual = np.full_like(values, data.draw(strategies.sampled_from([0, -0.25, 1e-3])))
    _assert_same_bits(core, name, parameters, values, residual)


@pytest.mark.parametrize("name, parameters", _EVERY, ids=[reference.text(n, **p) for n, p in _EVERY])
def test_the_size_of_a_message_does_not_depend_on_the_values(core, name, parameters):
    compressor = core.Compressor(reference.text(name, **parameters))
    for count in (1, 100, 70000):
        sizes = {
            compressor.encode(values).size for values in (np.zeros(count), np.ones(count), _normal(count, "float64"))
        }
        assert len(sizes) == 1
    assert compressor.encode(np.zeros(0)).size == 0
    compressor.decode(np.zeros(0, np.uint8), np.zeros(0))


@pytest.mark.parametrize(
    "text, least",
    [
        ("2bit", 15.9),
        ("1bit", 31.8),
        ("onebit", 31.8),
        ("dithering", 3.9),
        ("dithering k=7", 7.9),
        ("dithering k=1", 15.9),
        ("dithering partition=natural", 7.9),
        ("topk k=0.01", 66),  # 6 bytes for an element of 4
        ("randomk k=0.01", 66),
    ],
)
def test_messages_are_short(core, text, least):
    values = _normal(65536, "float32")
    assert values.nbytes / core.Compressor(text).encode(values).size > least


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name, parameters", _EVERY, ids=[reference.text(n, **p) for n, p in _EVERY])
def test_what_is_not_finite_arrives_as_nan_and_spoils_nothing_afterwards(core, name, parameters, bad, dtype):
    compressor = core.Compressor(reference.text(name, **parameters))
    values, residual = _normal(1000, dtype), _normal(1000, dtype, 1)
    values[700] = bad
    kept = residual.copy()
    assert np.isnan(_decoded(compressor, compressor.encode(values, residual), values)).all()
    assert residual.tobytes() == kept.tobytes()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name, parameters", _CONTRACTIONS, ids=[reference.text(n, **p) for n, p in _CONTRACTIONS])
def test_a_contraction_never_loses_more_than_the_values(core, name, parameters, dtype):
    """In expectation for random-k (Stich et al. 2018), always for the others (Karimireddy et al. 2019)."""
    compressor = core.Compressor(reference.text(name, **parameters))
    random = np.random.RandomState(5)
    for values in (
        random.standard_normal(4000),
        random.standard_cauchy(4000),
        random.standard_normal(4000) * (random.uniform(size=4000) < 0.01),
        np.eye(1, 4000)[0],
        np.ones(4000),
        10.0 ** random.uniform(-30, 2, 4000),
    ):
        values = values.astype(dtype)
        norm = np.sum(values.astype("float64") ** 2)
        lost = []
        for step in range(40 if name == "randomk" else 1):
            message = compressor.encode(values, step=step)
            lost.append(np.sum((values - _decoded(compressor, message, values).astype("float64")) ** 2))
        assert np.mean(lost) <= norm * (1 + 1e-6)
        if name == "topk":
            kept = reference.number_kept(parameters["k"], 4000, 4000)
            assert lost[0] <= (1 - kept / 4000) * norm * (1 + 1e-6)


def test_random_k_loses_what_the_paper_says(core):
    """Of k of n elements, (1 - k / n) of the squared norm on average, and each element is taken equally often."""
    compressor = core.Compressor("randomk k=0.25 seed=4")
    values = _normal(64, "float64") + 3
    taken = np.zeros(64)
    for step in range(4000):
        taken += _decoded(compressor, compressor.encode(values, step=step), values) != 0
    assert taken.sum() == 16 * 4000
    # A binomial of 4000 draws: 1000 on average, with a standard deviation of 27.
    assert abs(taken - 1000).max() < 5 * 27.4


@pytest.mark.parametrize("name, parameters", _UNBIASED, ids=[reference.text(n, **p) for n, p in _UNBIASED])
def test_without_error_feedback_the_mean_of_what_arrives_is_the_value(core, name, parameters):
    """Wangni et al. 2018 for random-k, Alistarh et al. 2017 and Horvath et al. 2022 for dithering."""
    compressor = core.Compressor(reference.text(name, **parameters))
    values = np.array([0.0, 1.0, -1.0, 0.3, -0.02, 0.55, 0.1, -0.77, 0.25, 0.03], "float64")
    steps = 6000
    arrived = np.array([_decoded(compressor, compressor.encode(values, step=s), values) for s in range(steps)])
    deviation = arrived.std(axis=0) / np.sqrt(steps)
    assert (abs(arrived.mean(axis=0) - values) <= 5 * deviation + 1e-7).all()
    assert deviation.max() > 0


@pytest.mark.parametrize("levels", [1, 5, 20])
def test_dithering_errs_no_more_than_the_papers_say(core, levels):
    """QSGD, lemma 3.1: at most min(n / s^2, sqrt(n) / s) of the squared norm; natural dithering, theorem 7: 1/8 more
    and what the lowest level loses."""
    values = _normal(500, "float64")
    square = np.sum(values**2)
    for partition in ("linear", "natural"):
        text = reference.text("dithering", k=levels, partition=partition, normalize="l2", ef=False, seed=1)
        compressor = core.Compressor(text)
        lost = [
            np.sum((_decoded(compressor, compressor.encode(values, step=s), values) - values) ** 2) for s in range(300)
        ]
        least = levels if partition == "linear" else 2.0 ** (levels - 1)
        bound = min(500 / least**2, np.sqrt(500) / least) + (0.125 if partition == "natural" else 0)
        assert np.mean(lost) <= bound * square * 1.02


@pytest.mark.parametrize("name, parameters", _CONTRACTIONS, ids=[reference.text(n, **p) for n, p in _CONTRACTIONS])
def test_with_error_feedback_nothing_is_lost_in_the_long_run(core, name, parameters):
    """The decoded values plus the residual equal the sent values, and the residual stays bounded."""
    compressor = core.Compressor(reference.text(name, **parameters))
    values = _normal(300, "float64")
    residual, arrived = np.zeros(300), np.zeros(300)
    sizes = []
    for step in range(600):
        arrived += _decoded(compressor, compressor.encode(values, residual, step=step), values)
        sizes.append(np.linalg.norm(residual))
        np.testing.assert_allclose(arrived + residual, (step + 1) * values, rtol=1e-9, atol=1e-9)
    assert max(sizes[300:]) <= 1.5 * max(sizes[:300]), "what is kept back grows and grows"


@pytest.mark.parametrize("name, threshold", [("2bit", 0.5), ("2bit", 2.0), ("1bit", 0.5), ("1bit", 0.0)])
def test_mxnets_compressors_keep_back_what_the_documentation_says(core, name, threshold):
    """Element by element, from the description of 2bit and 1bit in MXNet's documentation."""
    compressor = core.Compressor(f"{name} threshold={threshold}")
    residual = np.zeros(200, "float32")
    expected = np.zeros(200, "float32")
    for step in range(20):
        values = _normal(200, "float32", step)
        sent = _decoded(compressor, compressor.encode(values, residual), values)
        for i in range(200):
            expected[i] += values[i]
            if name == "1bit":
                one = 1 if expected[i] > threshold else -1
            else:
                one = threshold * (int(expected[i] >= threshold) - int(expected[i] <= -threshold))
            assert sent[i] == one
            expected[i] -= np.float32(one)
        assert (residual == expected).all()


@pytest.mark.parametrize("name, unit", [("2bit", 0.25), ("1bit", 0.25), ("onebit scaling=False", 8.0)])
def test_levels_of_a_fixed_size_follow_the_unit(core, name, unit):
    """What is compressed a second time is a scaled sum: the same happens to it in its own units."""
    compressor = core.Compressor(name)
    values = _normal(300, "float64")
    plain = _decoded(compressor, compressor.encode(values), values)
    scaled = _decoded(compressor, compressor.encode(values * unit, unit=unit), values)
    assert (scaled == plain * unit).all()


def test_the_first_of_equal_elements_are_the_largest(core):
    compressor = core.Compressor("topk k=100")
    for values in (np.ones(70000, "float32"), -np.ones(70000, "float32"), np.zeros(70000, "float32")):
        message = compressor.encode(values)
        assert (message[16 + 400 :].view("<u4") == np.arange(100)).all()


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_a_number_of_elements_is_shared_among_the_pieces_of_an_array(core, name):
    compressor = core.Compressor(f"{name} k=100")
    values = _normal(1000, "float32")
    for total, kept in [(1000, 100), (10000, 10), (10001, 10), (10**6, 1), (0, 100)]:
        message = compressor.encode(values, total=total)
        decoded = _decoded(compressor, message, values, total=total)
        assert np.count_nonzero(decoded) == kept
    half = core.Compressor(f"{name} k=0.5")
    assert np.count_nonzero(_decoded(half, half.encode(values), values)) == 500


def test_damaged_messages_are_errors(core):
    values = _normal(100, "float32")
    for text in ("2bit", "topk k=5"):
        compressor = core.Compressor(text)
        message = compressor.encode(values)
        for place, value in [(0, 99), (4, 2)]:
            damaged = message.copy()
            damaged[place] = value
            with pytest.raises(compiled.core.Error, match="damaged"):
                compressor.decode(damaged, values.copy())
        with pytest.raises(compiled.core.Error, match="bytes, not"):
            compressor.decode(message[:-1], values.copy())
    message[-2:] = 255  # the last index
    with pytest.raises(compiled.core.Error, match="element 65535 of 100"):
        compressor.decode(message, values.copy())


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "needs a name"),
        ("3bit", "there is no compressor '3bit'"),
        ("2bit threshold=0", "must be above 0"),
        ("2bit threshold=nan", "threshold of the compressor '2bit' must be a number, not nan"),
        ("2bit threshold=0.5x", "threshold of the compressor '2bit' must be a number, not 0.5x"),
        ("2bit threshold", "cannot be read: 'threshold'"),
        ("2bit threshold=1 threshold=2", "cannot be read"),
        ("2bit k=1", "'2bit' has no parameter k"),
        ("onebit scaling=1", "scaling of the compressor 'onebit' must be True or False, not 1"),
        ("topk k=0", "a whole number from 1, or a fraction"),
        ("topk k=1.5", "a whole number from 1, or a fraction"),
        ("topk ef=maybe", "ef of the compressor 'topk' must be True or False, not maybe"),
        ("randomk seed=-1", "seed of the compressor 'randomk' must be a whole number from 0"),
        ("dithering k=40000", "k of the compressor 'dithering' must be a whole number from 1 to 32767, not 40000"),
        ("dithering k=33 partition=natural", "from 1 to 32, not 33"),
        ("dithering normalize=l1", "normalize of the compressor 'dithering' must be max or l2, not l1"),
    ],
)
def test_wrong_parameters_are_errors_that_name_them(core, text, sentence):
    with pytest.raises(compiled.core.Error, match=sentence):
        core.Compressor(text)


def test_wrong_arrays_are_errors(core):
    compressor = core.Compressor("2bit")
    for values in (np.zeros(4, "int32"), np.zeros(4, "float16"), np.zeros((4, 4))[:, 0]):
        with pytest.raises(ValueError, match="C-contiguous arrays of float32 and float64"):
            compressor.encode(values)
    with pytest.raises(ValueError, match="shape and dtype of the values"):
        compressor.encode(np.zeros(4), np.zeros(5))
