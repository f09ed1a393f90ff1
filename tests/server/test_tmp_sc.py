import sys
def test_it(graphs):
    print(graphs.get_json("/dspark/capabilities")["self_check"], file=sys.stderr)
    text = graphs.log_path.read_text()
    print([line[-400:] for line in text.splitlines() if "DSPARK:" in line][-12:], file=sys.stderr)
    print(graphs.startup_s, file=sys.stderr)
    print([line[:600] for line in text.splitlines() if "compiled while" in line][-12:], file=sys.stderr)
