"""What only the book needs: pictures, experiments, and an oracle that remembers who wrote each
row."""
