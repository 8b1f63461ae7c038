"""Faults on purpose: what goes wrong and when, who carries it out, and what must hold meanwhile.

`schedule` and `checker` are pure; `nemesis` and `load` act. `dynbus lab chaos` and the failure
stories of the tests share them.
"""
