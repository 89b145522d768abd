"""Times torch and torch_gemm side by side in suites of shapes: tables, plots, an HTML page, comparison with a stored result."""
