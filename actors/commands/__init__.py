"""Commands that start or call actors: `run`, `call` and `bench`.

The file of a command's name reads its command line. What takes long to import is in the file of
its doing, which is imported when the command runs: `running`, `calling`, `benchmarking`.
"""
