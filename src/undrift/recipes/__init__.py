"""The methods' rows, a file for each family; `undrift.methods` lists them together."""
