"""Load generator for speech servers: inputs (`samples`, `jobs`), requests (`runner`), results (`measure`, `report`,
`plot`).
"""
