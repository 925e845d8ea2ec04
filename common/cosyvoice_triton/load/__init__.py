"""Loads: what is sent (`samples`, `jobs`, `plan`), where to (`doors`), by whom (`runner`), results (`measure`,
`report`). `bench load`, `bench token2wav`, `evaluate` and the soak of tests/ are uses.
"""
