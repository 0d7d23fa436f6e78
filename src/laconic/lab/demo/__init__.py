"""What ``laconic demo`` shows: a race that ends with a picture, and a worker that is lost."""
