"""The chart: values, rendered objects, what Ray and the service make of them."""
