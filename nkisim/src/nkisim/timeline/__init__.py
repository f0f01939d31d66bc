"""Time: the chip, the laws of cost, dependence, the schedule, and pictures of it."""
