"""The compiled kernel: the prefix tree in arrays, and XXH3. Importing its modules compiles them."""
