"""What MXNet's tests import from nose.tools."""

import functools
import unittest

_CASE = unittest.TestCase()

assert_almost_equal = assert_almost_equals = _CASE.assertAlmostEqual
assert_equal = assert_equals = eq_ = _CASE.assertEqual
assert_not_equal = _CASE.assertNotEqual
assert_raises = _CASE.assertRaises
assert_true = ok_ = _CASE.assertTrue
assert_false = _CASE.assertFalse


def make_decorator(function):
    """A decorator that gives a wrapper the name and the attributes of `function`, but not its arguments."""

    def decorate(wrapper):
        named = functools.wraps(function)(wrapper)
        del named.__wrapped__  # pytest would take the arguments of `function` for fixtures
        return named

    return decorate


def raises(*errors):
    """The test must raise one of these errors."""

    def decorate(function):
        @make_decorator(function)
        def test(*args, **kwargs):
            with _CASE.assertRaises(errors):
                function(*args, **kwargs)

        return test

    return decorate


def with_setup(setup=None, teardown=None):
    """The test runs between two functions."""

    def decorate(function):
        @make_decorator(function)
        def test(*args, **kwargs):
            if setup is not None:
                setup()
            try:
                function(*args, **kwargs)
            finally:
                if teardown is not None:
                    teardown()

        return test

    return decorate


def nottest(function):
    """The function is no test."""
    function.__test__ = False
    return function


def istest(function):
    """The function is a test."""
    function.__test__ = True
    return function
