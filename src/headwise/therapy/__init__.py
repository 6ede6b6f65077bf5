"""Therapy is the verb repair: it writes a plan by measurement, has it carried out and judges it."""
