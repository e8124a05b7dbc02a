"""Plants faults in the code, one at a time, and sees whether the tests notice: ``make faults``.

python_faults   which faults there can be in a Python file: from its syntax tree
cpp_faults      the same in a C++ file: from its text
coverage        which tests are to notice a fault of a file
trial           a copy of the tree, in which a fault is planted and the tests run
__main__        the draw, a results file from which a run goes on, and the table
"""
